"""A pipeline of three nodes, of whose two links the second carries a fiftieth of the first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.netns.fleet import DEADLINE_S, Fleet

NODES = 3
# What goes from stage to stage is a megabyte: 8 ms of a good link, and 400 of the slow one.
SPEC: dict[str, Any] = {
    "name": "piped",
    "steps": 100_000,
    "model": {"layers": 3, "hidden": 64, "heads": 4, "seq_len": 256},
    "parallel": {"pp": NODES, "micro_batch": 16},
    "data": {"global_batch": 48, "max_bytes": 262144},
    "resources": {"nodes": NODES, "workers_per_node": 1, "device": "cpu"},
    "recovery": {"preflight": False},
    "eval": {"interval_steps": None},
}
STEPS = 6


@contextmanager
def slow_link(folder: Path) -> Iterator[tuple[Fleet, str]]:
    """The fleet, and a job whose newest steps the link between stages 1 and 2 has held up."""
    spec = folder / "job.json"
    spec.write_text(json.dumps(SPEC))
    with Fleet(folder, NODES).running() as fleet:
        fleet.outlast("submit", str(spec))
        (job,) = fleet.api("/jobs")["jobs"]
        job_id = str(job["job_id"])
        until(lambda: step_of(fleet, job_id) >= STEPS, "the job trains")
        first, second = _nodes_of(fleet, job_id)[1:]
        with fleet.limited_link(first, second):
            begun = step_of(fleet, job_id)
            until(lambda: step_of(fleet, job_id) >= begun + STEPS, "steps over the slow link")
            yield fleet, job_id


def step_of(fleet: Fleet, job_id: str) -> int:
    """The last step that the job has done."""
    return int(fleet.api(f"/jobs/{job_id}")["job"]["step"])


def transfers_s(track: dict[str, Any]) -> float:
    """For how long a rank waited in receives for messages that had left already."""
    return sum(
        bar["ended_s"] - bar["begun_s"] - bar["waited_s"]
        for bar in track["bars"]
        if bar["name"] == "recv" and bar["last"] is not None
    )


def _nodes_of(fleet: Fleet, job_id: str) -> list[str]:
    """The node of each rank, which here is its stage."""
    return [str(rank["node"]) for rank in fleet.api(f"/jobs/{job_id}/ranks")["ranks"]]


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until that is so."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"not within its time: {what}"
        time.sleep(0.2)
