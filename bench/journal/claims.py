"""What the figures of the journal claim."""

from __future__ import annotations

from typing import Any

from bench.journal.replay import DAYS
from bench.results import Claim

# What an attempt may write, whatever the number of nodes: signs and lines of the incident.
FIXED_BYTES = 40_000
# And for each node: its name in the attempt, in the orders and in their answers.
BYTES_PER_NODE = 100
GOAL_REPLAY_S = 5.0


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """The claims of attempts, of one row for each size, the smallest first."""
    where = f"{rows[-1]['nodes']:,} nodes of 8 ranks"
    return [*_of_an_attempt(rows, where), *_of_single_events(rows[-1], where)]


def _of_an_attempt(rows: list[dict[str, Any]], where: str) -> list[Claim]:
    smallest, largest = rows[0], rows[-1]
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
    ]


def _of_single_events(largest: dict[str, Any], where: str) -> list[Claim]:
    return [
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
            goal="<= 60",
            baseline="40,000 bytes (0.5 GB in all) with the job in each",
            how="every rank's end is an event of its own",
        ),
    ]


def replay_claim(row: dict[str, Any]) -> Claim:
    """The claim of reading a long journal."""
    return Claim(
        claim=f"a controller reads a journal of {DAYS} days on {row['nodes']:,} nodes "
        f"({row['faults']} faults, {row['checkpoints']:,} checkpoints)",
        value=row["replay_s"],
        unit="s",
        goal=f"<= {GOAL_REPLAY_S:g}",
        baseline="right before a snapshot, the worst moment",
        how=f"{row['snapshots']} snapshots on the way, {row['read_bytes'] / 1e6:.1f} MB to read",
    )
