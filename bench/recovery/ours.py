"""A worker of Outlast is killed or stopped; the job's next attempt is what recovers."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.recovery.setting import (
    SPEC,
    STRIKE_AFTER_STEP,
    VICTIM_RANK,
    read_json,
    wait_for,
)
from checkpoint.core.names import memory_folder
from checkpoint.stage.slotfile import read_table
from controller.local.cluster import LocalConfig
from outlast.blackbox import Reader, StartMark
from outlast.client import Client
from outlast.v1 import incidents_pb2

_FOLDER = memory_folder(VICTIM_RANK)
_PARTS = (
    ("groups", StartMark.GROUPS_READY),
    ("model", StartMark.MODEL_READY),
    ("restore", StartMark.RESTORED),
)


@contextmanager
def controller(state_dir: Path, *, nodes: int = 1, workers: int = 2) -> Iterator[Client]:
    """A controller with local nodes of so many workers each, until the end of the block."""
    state_dir.mkdir(parents=True)
    command = [sys.executable, "-m", "controller", "--state-dir", str(state_dir)]
    command += ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command += ["--local-nodes", str(nodes), "--workers-per-node", str(workers)]
    with (state_dir.parent / "controller.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            facts = wait_for(lambda: read_json(state_dir / "controller.json"), "the controller")
            client = Client(facts["grpc"])
            wait_for(
                lambda: sum(node.connected for node in client.nodes()) == nodes, "nodes to join"
            )
            yield client
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)
            # It would find its nodes' host memory again; the next one here needs the room.
            shutil.rmtree(_memory_dir(state_dir), ignore_errors=True)


def _memory_dir(state_dir: Path) -> Path:
    config = LocalConfig(state_dir=state_dir, nodes=0, workers_per_node=0, controller_address="")
    return config.memory_dir


def strike(
    client: Client,
    state_dir: Path,
    number: int,
    how: signal.Signals,
    *,
    spec: Mapping[str, Any] = SPEC,
    num_ranks: int = 2,
) -> dict[str, Any]:
    """Send `how` to a worker of a fresh job, and follow the job until all ranks train again."""
    job_id = client.submit({**spec, "name": f"recovery-{number}"}).job_id
    before, after = (_Attempt(state_dir, job_id, attempt, num_ranks) for attempt in (1, 2))
    with before, after:
        row = _followed(client, state_dir, job_id, how, before, after)
    client.cancel(job_id)
    wait_for(lambda: client.get(job_id)[0].state == "CANCELLED", "the job's end")
    return row


def _followed(
    client: Client,
    state_dir: Path,
    job_id: str,
    how: signal.Signals,
    before: _Attempt,
    after: _Attempt,
) -> dict[str, Any]:
    wait_for(lambda: min(before.steps(), default=-1) >= STRIKE_AFTER_STEP, "the first steps")
    step_s = before.step_s()
    victim = before.boxes()[VICTIM_RANK].present().pid
    struck_s = time.time()
    os.kill(victim, how)
    wait_for(after.has_trained, "the next attempt's first step")
    reached = max(before.steps())
    (table,) = map(read_table, _memory_dir(state_dir).glob(f"*/{job_id}/{_FOLDER}"))
    assert table is not None, "the next attempt has loaded what it says"
    incident = wait_for(lambda: next(iter(client.incidents(job_id)), None), "the incident")
    pids = [{box.present().pid for box in attempt.boxes()} for attempt in (before, after)]
    firsts = [box.new_steps()[0] for box in after.boxes()]
    end_s = max(record.end_ns for record in firsts) / 1e9
    return {
        "launcher": "outlast",
        "signal": how.name,
        "recovery_s": end_s - struck_s,
        "ranks_made_anew": len(pids[1] - pids[0]),
        "steps_redone": max(0, reached - (firsts[0].step - 1)),
        "step_s": step_s,
        "state_bytes": table.payload_bytes,
        "split_s": _split(struck_s, incident, after.boxes(), end_s),
    }


class _Attempt:
    """The black boxes of one attempt's ranks, each open from the time that it is there."""

    def __init__(self, state_dir: Path, job_id: str, attempt: int, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._folder = state_dir / "nodes"
        self._pattern = f"*/jobs/{job_id}/a{attempt}/rank-*.blackbox"
        self._boxes: dict[Path, Reader] = {}

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        while self._boxes:
            self._boxes.popitem()[1].close()

    def boxes(self) -> list[Reader]:
        """Those that are there, by rank."""
        if len(self._boxes) < self._num_ranks:
            for path in self._folder.glob(self._pattern):
                if path not in self._boxes and (box := open_box(path)) is not None:
                    self._boxes[path] = box
        return [self._boxes[path] for path in sorted(self._boxes, key=lambda path: path.name)]

    def steps(self) -> list[int]:
        return [box.present().completed_step for box in self.boxes()]

    def has_trained(self) -> bool:
        """Whether all ranks have completed a step that they began with in this attempt."""
        present = [box.present() for box in self.boxes()]
        return len(present) == self._num_ranks and all(
            now.completed_step > now.resumed_step >= 0 for now in present
        )

    def step_s(self) -> float:
        """How long a step takes, first ones left out."""
        ends = [record.end_ns for record in self.boxes()[0].new_steps()][5:]
        gaps = (later - earlier for earlier, later in pairwise(ends))
        return statistics.median(gaps) / 1e9


def _split(
    struck_s: float, incident: incidents_pb2.Incident, boxes: Sequence[Reader], end_s: float
) -> dict[str, float]:
    marks = [box.marks() for box in boxes]
    starting_s = next(entry.at_s for entry in incident.timeline if entry.phase == "starting")
    forked_s = max(found[StartMark.FORKED] for found in marks) / 1e9
    split = {
        "detect": incident.opened_s - struck_s,
        "stop": starting_s - incident.opened_s,
        "fork": forked_s - starting_s,
    }
    before_s = forked_s
    for part, mark in _PARTS:
        at_s = max(found[mark] for found in marks) / 1e9
        split[part] = at_s - before_s
        before_s = at_s
    split["first_step"] = end_s - before_s
    return {name: round(value, 4) for name, value in split.items()}


def open_box(path: Path) -> Reader | None:
    """A black box, once its rank has opened it."""
    try:
        return Reader(path)
    except (FileNotFoundError, ValueError):
        return None
