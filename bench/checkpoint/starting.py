"""From the fork of a worker to its first step, by where its state comes from.

A job under a controller and an agent, as users run it: its worker is killed and finds its
state in host memory; another job begins with its checkpoint in storage; of a third, whose
replicas share the state, a node is lost with its memory, and another one gets what it held
from the memory of the first one's peer.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.checkpoint.gpt import SIZES, Size
from bench.checkpoint.options import Measured, Options
from bench.recovery.ours import controller, open_box
from bench.recovery.setting import wait_for
from bench.results import Claim
from checkpoint.core.names import replica_folder
from checkpoint.core.slots import newest_sealed
from checkpoint.stage import slotfile
from controller.local.cluster import LocalConfig
from controller.local.processes import kill, members_of
from outlast.blackbox import Reader, StartMark
from outlast.client import Client

# Moments of a start, in order, each with the name of what has been done by then.
_MARKS = (
    ("groups", StartMark.GROUPS_READY),
    ("model", StartMark.MODEL_READY),
    ("restore", StartMark.RESTORED),
    ("first_step", StartMark.FIRST_STEP),
)
_KILLED_AFTER_STEP = 3
# Kills of one job: within the retries that it has by default.
_MOST_KILLS = 3


def measure(options: Options) -> Measured:
    """What it takes from host memory and from storage, with the parts of it."""
    size = options.sized(SIZES["1"])
    starts: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder:
        root = Path(folder)
        with controller(root / "state") as client:
            runs = _Runs(client, root, size)
            job_id = runs.submit("first")
            starts["memory"] = [
                runs.killed(job_id, attempt)
                for attempt in range(1, 1 + min(options.rounds, _MOST_KILLS))
            ]
            wait_for(lambda: client.get(job_id)[0].committed_step > 0, "a checkpoint in storage")
            runs.cancel(job_id)
            starts["storage"] = [
                runs.begun_with(job_id, number)
                for number in range(min(options.rounds, _MOST_KILLS))
            ]
        starts["replica"] = [
            _without_a_node(root / f"replica-{number}", size)
            for number in range(min(options.rounds, _MOST_KILLS))
        ]
    row = {"size": size.name, "nbytes": size.nbytes, "starts": starts}
    print("starting:", row, flush=True)
    return [row], [_claim(source, found, size) for source, found in starts.items()]


def _without_a_node(root: Path, size: Size) -> dict[str, float]:
    """How a job of two nodes starts again that lost one of them, and has nothing in storage."""
    state_dir = root / "state"
    root.mkdir()
    with controller(state_dir, nodes=3, workers=1) as client:
        runs = _Runs(client, root, size, is_replicated=True)
        job_id = runs.submit("replicated")
        held = wait_for(lambda: runs.copied(job_id), "copies on both nodes")
        lost = client.get(job_id)[0].nodes[1]
        lost_s = time.time()
        _lose(state_dir, lost)
        box = runs.box(job_id, 2, 1, rank=1)
        if box.present().resumed_step < held:
            raise RuntimeError(f"went on from step {box.present().resumed_step}, not from {held}")
        split = _split(box)
        before = box.marks()[StartMark.FORKED] / 1e9 - lost_s
        runs.cancel(job_id)
    return {"until_fork": before, **split, "total": before + split["total"]}


def _lose(state_dir: Path, node: str) -> None:
    """Kill everything on a local node; its host memory goes with it, as in a power cut."""
    agent = json.loads((state_dir / "nodes" / node / "process.json").read_text())["pid"]
    for pid in members_of([agent]):
        kill(pid)


class _Runs:
    """Jobs of one worker, which saves every step to memory and now and then to storage."""

    def __init__(
        self, client: Client, root: Path, size: Size, *, is_replicated: bool = False
    ) -> None:
        self._client = client
        self._root = root
        self._spec = size.spec(dp=2 if is_replicated else 1).model_dump(mode="json")
        self._spec["resources"]["workers_per_node"] = 1
        self._spec["checkpoint"] |= {"url": f"file://{root}/store", "memory_interval_steps": 1}
        if is_replicated:
            # Without ZeRO either node would hold all of the state, and copy nothing.
            self._spec["parallel"]["zero"]["level"] = 1
            self._spec["checkpoint"]["replicas"] = 1
        else:
            self._spec["checkpoint"]["storage_interval_steps"] = 2

    def submit(self, name: str, **checkpoint: str) -> str:
        spec = {**self._spec, "name": name}
        spec["checkpoint"] = {**self._spec["checkpoint"], **checkpoint}
        return str(self._client.submit(spec).job_id)

    def killed(self, job_id: str, attempt: int) -> dict[str, float]:
        """How the attempt after this one starts, whose worker is killed in full run."""
        first = self.box(job_id, attempt, _KILLED_AFTER_STEP)
        os.kill(first.present().pid, signal.SIGKILL)
        return _split(self.box(job_id, attempt + 1, 1))

    def begun_with(self, job_id: str, number: int) -> dict[str, float]:
        """How a job starts that loads the newest checkpoint of another."""
        later = self.submit(f"later-{number}", load=f"file://{self._root}/store/{job_id}")
        split = _split(self.box(later, 1, 1))
        self.cancel(later)
        return split

    def cancel(self, job_id: str) -> None:
        self._client.cancel(job_id)
        wait_for(lambda: self._client.get(job_id)[0].state == "CANCELLED", "the job's end")

    def copied(self, job_id: str) -> int:
        """The newest step of which either node holds the other's part; 0: none yet."""
        state_dir = self._root / "state"
        config = LocalConfig(
            state_dir=state_dir, nodes=1, workers_per_node=1, controller_address=""
        )
        held = [
            newest_sealed([slot.read() for slot in slotfile.open_existing(folder)])
            for rank in range(2)
            for folder in config.memory_dir.glob(f"*/{job_id}/{replica_folder(rank)}")
        ]
        return max(0, min(held)) if len(held) == 2 else 0

    def box(self, job_id: str, attempt: int, num_steps: int, rank: int = 0) -> Reader:
        """The black box of an attempt's worker once it has made so many steps."""

        def ready() -> Reader | None:
            pattern = f"nodes/*/jobs/{job_id}/a{attempt}/rank-*{rank}.blackbox"
            boxes = map(open_box, (self._root / "state").glob(pattern))
            return next((box for box in boxes if box and _num_steps(box) >= num_steps), None)

        box = wait_for(ready, f"{num_steps} steps of attempt {attempt}")
        assert isinstance(box, Reader)
        return box


def _num_steps(box: Reader) -> int:
    present = box.present()
    return max(0, present.completed_step - max(0, present.resumed_step))


def _split(box: Reader) -> dict[str, float]:
    """Seconds of each part of a start, and of all of it."""
    marks = box.marks()
    forked = before = marks[StartMark.FORKED]
    split = {}
    for name, mark in _MARKS:
        split[name] = (marks[mark] - before) / 1e9
        before = marks[mark]
    return split | {"total": (before - forked) / 1e9}


def _claim(source: str, found: Sequence[dict[str, float]], size: Size) -> Claim:
    parts = ", ".join(
        f"{name} {statistics.median(split[name] for split in found):.2f}"
        for name in found[0]
        if name != "total"
    )
    whence = (
        "two workers on two nodes, ZeRO 1; from the loss of a node with its memory"
        if source == "replica"
        else "one worker; from its fork"
    )
    return Claim(
        claim=f"{source}_to_first_step",
        value=statistics.median(split["total"] for split in found),
        unit="s",
        goal="reported",
        baseline="none",
        how=f"a GPT state of {size.nbytes / 1e9:.2f} GB, {whence} to the end of the first "
        f"step, in the median {parts} s",
    )
