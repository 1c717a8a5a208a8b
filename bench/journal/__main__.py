"""What the controller's journal costs: bytes and time per attempt, and reading 54 days of it.

Sizes from 8 to 1,536 nodes of 8 ranks, each in a process of its own; then a journal of 54 days on
512 nodes, read as a controller that starts does. Bytes are those of the journal's rows; times
are CPU time, so that a busy machine does not change them much.

    python -m bench.journal [--nodes 8,64,512,1536] [--without-replay]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.journal.attempts import attempts
from bench.journal.replay import DAYS, replay
from bench.results import Claim, write

SIZES = (8, 64, 512, 1_536)
# Of the 54 days, which take minutes to write.
REPLAY_NODES = 512
# What an attempt may write, whatever the number of nodes: signs and lines of the incident.
FIXED_BYTES = 100_000
# And for each node: its orders, their answers, its name in the job.
BYTES_PER_NODE = 800
GOAL_REPLAY_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default=",".join(map(str, SIZES)))
    parser.add_argument("--without-replay", action="store_true")
    parser.add_argument("--case", choices=("attempts", "replay"), help="one case, in this process")
    options = parser.parse_args()
    sizes = [int(size) for size in options.nodes.split(",")]
    if options.case:
        with tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder:
            print(json.dumps(_case(options.case, Path(folder), sizes[0])))
        return 0
    rows = [_in_process("attempts", size) for size in sizes]
    claims = _claims(rows)
    if not options.without_replay:
        rows.append(_in_process("replay", min(REPLAY_NODES, sizes[-1])))
        claims.append(_replay_claim(rows[-1]))
    write("journal", rows, claims)
    return 0


def _case(case: str, folder: Path, num_nodes: int) -> dict[str, Any]:
    if case == "replay":
        return replay(folder, num_nodes)
    return asyncio.run(attempts(folder, num_nodes))


def _in_process(case: str, num_nodes: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.journal", "--case", case, "--nodes", str(num_nodes)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row = {"case": case, **json.loads(done.stdout.splitlines()[-1])}
    print(json.dumps(row), flush=True)
    return row


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    smallest, largest = rows[0], rows[-1]
    where = f"{largest['nodes']:,} nodes of 8 ranks"
    added = largest["nodes"] - smallest["nodes"]
    how = (
        "a rank is killed, all others lose it, every node stops and starts again; service, "
        "journal and tables in one process, agents as events"
    )
    allowed = max(
        row["attempt_bytes"] / (FIXED_BYTES + BYTES_PER_NODE * row["nodes"]) for row in rows
    )
    return [
        Claim(
            claim=f"bytes of an attempt over {FIXED_BYTES:,} + {BYTES_PER_NODE} per node, "
            f"worst of {len(rows)} sizes",
            value=allowed,
            unit="of the limit",
            goal="<= 1",
            baseline="1,600 bytes per node with records written whole",
            how=how,
        ),
        Claim(
            claim=f"bytes of an attempt for each node more, {smallest['nodes']} to {where}",
            value=(largest["attempt_bytes"] - smallest["attempt_bytes"]) / added,
            unit="bytes",
            goal=f"<= {BYTES_PER_NODE}",
            baseline="1,600 bytes with records written whole",
            how=how,
        ),
        Claim(
            claim=f"CPU time of an attempt for each node, {where} against "
            f"{rows[-2]['nodes']:,} nodes",
            value=(largest["attempt_s"] / largest["nodes"])
            / (rows[-2]["attempt_s"] / rows[-2]["nodes"]),
            unit="times",
            goal="<= 1.5",
            baseline="1 is linear",
            how=how,
        ),
        Claim(
            claim=f"a checkpoint of a job on {where}",
            value=largest["checkpoint_bytes"],
            unit="bytes",
            goal="<= 300",
            baseline="48,000 bytes, the whole job",
            how="median of three commits",
        ),
        Claim(
            claim=f"ends of {largest['ranks']:,} ranks and of their job: bytes for each rank",
            value=largest["end_bytes"] / largest["ranks"],
            unit="bytes",
            goal="<= 250",
            baseline="40,000 bytes (0.5 GB in all) with the job in each",
            how="every rank's end is an event of its own",
        ),
    ]


def _replay_claim(row: dict[str, Any]) -> Claim:
    return Claim(
        claim=f"a controller reads a journal of {DAYS} days on {row['nodes']:,} nodes "
        f"({row['faults']} faults, {row['checkpoints']:,} checkpoints)",
        value=row["replay_s"],
        unit="s",
        goal=f"<= {GOAL_REPLAY_S:g}",
        baseline="right before a snapshot, the worst moment",
        how=f"{row['snapshots']} snapshots on the way, {row['read_bytes'] / 1e6:.1f} MB to read",
    )


if __name__ == "__main__":
    sys.exit(main())
