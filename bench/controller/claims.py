"""What the cost of a large fleet claims."""

from __future__ import annotations

from typing import Any

from bench.controller.fleet import WORKERS
from bench.results import Claim

# How long the watched job is looked at, and by how many at most.
WATCHED_S = 10.0
NUM_WATCHERS = 3
# The version that this program was written for, with 2,000 nodes on the same machine (12,500
# did not fit): the job's whole record with every answer, every rank's node in every order.
_BEFORE = "the version with whole records in the journal, 2,000 nodes"
_HOW = "service, journal and tables in one process, agents as events; CPU time, bytes written"


def claims_of(rows: dict[str, dict[str, Any]], num_nodes: int) -> list[Claim]:
    """The claims, of one row for each case."""
    where = f"{num_nodes} nodes of {WORKERS} ranks"
    return [
        *_of_the_loop(rows["start"], rows["queued"], where),
        *_of_memory(rows["start"], rows["restart"], where),
        _of_watching(rows[f"watch{NUM_WATCHERS}"], rows["watch0"], where),
    ]


def _of_the_loop(first: dict[str, Any], queued: dict[str, Any], where: str) -> list[Claim]:
    return [
        Claim(
            claim=f"first start on {where}: bytes that the journal writes",
            value=first["journal_bytes"] / 1e6,
            unit="MB",
            goal="<= 300",
            baseline=f"630 MB ({_BEFORE})",
            how=_HOW,
        ),
        Claim(
            claim=f"first start on {where}: CPU time of the loop",
            value=first["blocked_s"],
            unit="s",
            goal="<= 30",
            baseline=f"6.2 s ({_BEFORE})",
            how=_HOW,
        ),
        Claim(
            claim=f"first start on {where}: longest turn of the loop, by CPU time",
            value=first["longest_turn_s"],
            unit="s",
            goal="<= 5",
            baseline=f"3.4 s ({_BEFORE})",
            how=_HOW,
        ),
        Claim(
            claim=f"{where} join one by one while a job waits for all: CPU time of the loop",
            value=queued["blocked_s"],
            unit="s",
            goal="<= 30",
            baseline="a look at all nodes for each that joins",
            how=_HOW,
        ),
    ]


def _of_memory(first: dict[str, Any], restarted: dict[str, Any], where: str) -> list[Claim]:
    return [
        Claim(
            claim=f"first start on {where}: peak memory of the controller",
            value=first["peak_bytes"] / 2**20,
            unit="MiB",
            goal="<= 1024",
            baseline=f"1,666 MiB ({_BEFORE})",
            how="resident set of the process; orders are made one by one, as streams take them",
        ),
        Claim(
            claim=f"restart in the middle of a first start on {where}: peak memory",
            value=restarted["peak_bytes"] / 2**20,
            unit="MiB",
            goal="<= 1024",
            baseline="the state itself",
            how=f"half of the checks answered, then a new process; {restarted['snapshots']} "
            "snapshots while it starts",
        ),
    ]


def _of_watching(watched: dict[str, Any], alone: dict[str, Any], where: str) -> Claim:
    return Claim(
        claim=f"{NUM_WATCHERS} clients watch a job on {where}: share of one core",
        value=watched["cpu_share"],
        unit="of a core",
        goal="<= 0.5",
        baseline=f"{alone['cpu_share']:.3f} with no client",
        how=f"ten step reports a second for {WATCHED_S:g} s, agents as a table",
    )
