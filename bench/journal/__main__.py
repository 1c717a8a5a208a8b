"""What the controller's journal costs: bytes and time per attempt, and reading 54 days of it.

Sizes from 8 to 1,536 nodes of 8 ranks, each in a process of its own; then a journal of 54 days on
the largest of them, read as a controller that starts does. Bytes are those of the journal's rows;
times are CPU time, so that a busy machine does not change them much.

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
from bench.journal.claims import claims_of, replay_claim
from bench.journal.replay import replay
from bench.results import write

SIZES = (8, 64, 512, 1_536)
# Faults of one attempt after another are on nodes of their own.
LEAST_NODES = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default=",".join(map(str, SIZES)))
    parser.add_argument("--without-replay", action="store_true")
    parser.add_argument("--case", choices=("attempts", "replay"), help="one case, in this process")
    options = parser.parse_args()
    sizes = sorted(int(size) for size in options.nodes.split(","))
    if sizes[0] < LEAST_NODES:
        parser.error(f"--nodes {sizes[0]}: at least {LEAST_NODES}, one for each fault and one more")
    if options.case:
        with tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder:
            print(json.dumps(_case(options.case, Path(folder), sizes[0])))
        return 0
    rows = [_in_process("attempts", size) for size in sizes]
    claims = claims_of(rows)
    if not options.without_replay:
        rows.append(_in_process("replay", sizes[-1]))
        claims.append(replay_claim(rows[-1]))
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


if __name__ == "__main__":
    sys.exit(main())
