"""A rank of somebody else's launcher is killed; its events tell when all train again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.recovery.setting import STRIKE_AFTER_STEP, VICTIM_RANK, wait_for
from outlast.ports import free_port
from outlast.spec import JobSpec

Event = dict[str, Any]


# What a script writes down of its start, and the times that end with it.
PARTS = (
    ("started", "detect_stop_spawn"),
    ("imported", "import"),
    ("groups", "groups"),
    ("model", "model"),
    ("restored", "restore"),
    ("step", "first_step"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Commands to run side by side, each with its own environment, and what they write down.

    `parts` are the events of a start in their order, with the names of the times that end
    with them. Ranks of the next attempt are known by an `attempt` or a pid not seen before.
    """

    name: str
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]
    parts: Sequence[tuple[str, str]]


def torchrun() -> Launcher:
    """torchrun at its best; as shipped, sharing its store, it does not always resume."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=5", "--monitor-interval=0.1"]
    command += ["-m", "bench.baselines.torchrun_train"]
    return Launcher(
        name="torchrun",
        commands=[(command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})],
        parts=PARTS,
    )


def in_process(*, fastest: bool) -> Launcher:
    """NVIDIA's restart inside the process, with a spare process in reserve.

    With its own defaults, or with every interval cut to a tenth of a second.
    """
    port = free_port()
    command = [sys.executable, "-m", "bench.baselines.inprocess_train"]
    return Launcher(
        name="inprocess-fastest" if fastest else "inprocess-default",
        commands=[
            (
                command,
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": "3",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "FASTEST": str(int(fastest)),
                },
            )
            for rank in range(3)
        ],
        parts=(
            ("entered", "detect_abort"),
            ("groups", "groups"),
            ("restored", "restore"),
            ("step", "first_step"),
        ),
    )


def kill(launcher: Launcher, spec: JobSpec, folder: Path) -> dict[str, Any]:
    """SIGKILL of a rank; the row of its recovery."""
    folder.mkdir(parents=True)
    journal = Journal(folder / "events.jsonl")
    with _running(launcher, spec, folder, journal):
        pid = wait_for(journal.victim, f"first steps of {launcher.name}")
        killed_s = time.time()
        os.kill(pid, signal.SIGKILL)
        before = journal.read()
        after = wait_for(lambda: journal.recovered(before), f"next step of {launcher.name}")
    return row(launcher.name, launcher.parts, killed_s, before, after)


class Journal:
    """The events that all ranks append to one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Event]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines() if line[-1] == "}"]

    def victim(self) -> int | None:
        """Its pid, once it has trained for a while."""
        for line in self.read():
            is_victim = line["event"] == "step" and line["rank"] == VICTIM_RANK
            if is_victim and line["step"] >= STRIKE_AFTER_STEP:
                return int(line["pid"])
        return None

    def recovered(self, before: list[Event]) -> list[Event] | None:
        """What the next attempt wrote, once both ranks of it have completed a step."""
        old = {_start(line) for line in before}
        new = [line for line in self.read() if _start(line) not in old]
        ranks = {line["rank"] for line in new if line["event"] == "step"}
        return new if len(ranks) == 2 else None


def _start(event: Event) -> tuple[int, int]:
    return event["pid"], event.get("attempt", 0)


@contextmanager
def _running(launcher: Launcher, spec: JobSpec, folder: Path, journal: Journal) -> Iterator[None]:
    memory = Path(tempfile.mkdtemp(prefix="outlast-bench-", dir="/dev/shm"))
    (folder / "spec.json").write_text(spec.canonical_json())
    shared = {
        "EVENTS": str(journal.path),
        "SPEC": str(folder / "spec.json"),
        "CHECKPOINT": str(memory / "checkpoint.pt"),
        "OMP_NUM_THREADS": "1",
    }
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, memory)
        stack.callback(_end, processes, journal)
        log = stack.enter_context((folder / "log").open("wb"))
        for command, own in launcher.commands:
            processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **shared, **own},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        yield


def _end(processes: Sequence[subprocess.Popen[bytes]], journal: Journal) -> None:
    for process in processes:
        # Its own session: whatever it has started goes with it.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    # torchrun's workers have sessions of their own.
    for pid in {line["pid"] for line in journal.read()}:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for process in processes:
        process.wait()


def row(
    launcher: str,
    parts: Sequence[tuple[str, str]],
    killed_s: float,
    before: list[Event],
    after: list[Event],
) -> dict[str, Any]:
    """A recovery from what was written `before` the signal and `after` it."""

    def last(name: str) -> float:
        firsts: dict[int, float] = {}
        for line in after:
            if line["event"] == name:
                firsts.setdefault(line["rank"], line["at_s"])
        return max(firsts.values())

    split = {}
    before_s = killed_s
    for event, part in parts:
        split[part] = round(last(event) - before_s, 4)
        before_s = last(event)
    reached = max(line["step"] for line in before if line["event"] == "step")
    resumed = min(line["step"] for line in after if line["event"] == "restored")
    return {
        "launcher": launcher,
        "signal": signal.SIGKILL.name,
        "recovery_s": before_s - killed_s,
        "steps_redone": max(0, reached - resumed),
        "split_s": split,
    }
