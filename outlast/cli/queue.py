"""`outlast queue`: the jobs that wait for nodes, in the order in which they get them."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import typer

from outlast.cli import output
from outlast.cli.connect import controller_of
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import Controller, Json, StateDir
from outlast.durations import duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outlast.v1.jobs_pb2 import Job

_HEADER = ("#", "JOB", "OWNER", "PRIORITY", "WAITS", "REASON")


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(queue)


def queue(
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """List the jobs that wait for nodes, in the order in which they get them.

    Those of a higher priority come first; of equal ones those that nodes are kept for, then those
    whose owner has fewer nodes, then those that came first.
    """
    with controller_of(controller, state_dir) as client:
        jobs = client.list()
    waiting = sorted(
        (job for job in jobs if job.queue_position), key=lambda job: job.queue_position
    )
    held = _held(jobs)
    if json:
        facts = {
            "waiting": [output.facts(job) for job in waiting],
            "nodes_by_owner": dict(sorted(held.items())),
        }
        output.print_json(facts)
        return
    now_s = time.time()
    output.print_table(_HEADER, [_row(job, now_s) for job in waiting], empty="no job waits")
    if any(held):
        shares = ", ".join(f"{owner or 'nobody'} {count}" for owner, count in sorted(held.items()))
        output.print_wrapped(f"nodes in use, by owner of the job: {shares}")


def _held(jobs: Iterable[Job]) -> Counter[str]:
    """Nodes that running jobs have, by owner."""
    held = Counter[str]()
    for job in jobs:
        if not job.queue_position and not job.HasField("finished_s") and job.state != "PAUSED":
            held[job.owner] += sum(map(bool, job.nodes))
    return +held


def _row(job: Job, now_s: float) -> tuple[str, ...]:
    return (
        str(job.queue_position),
        job.job_id,
        job.owner or "-",
        str(job.priority),
        duration(now_s - job.state_since_s),
        job.reason,
    )
