"""What the workers of these tests do: steps in a black box, and misbehaviour on request.

`<data_dir>/behaviour.json` maps a rank to what it does; ranks not named train until stopped.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from outlast.blackbox import Group, Op, Phase, StartMark, StepRecord, Writer
from outlast.clock import node_time_ns
from outlast.worker_contract import WorkerContract, WorkerExitCode

STEP_S = 0.005


class Stop:
    """Set by SIGTERM."""

    asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def run(contract: WorkerContract) -> int:
    rank = contract.rank
    path = contract.data_dir / "behaviour.json"
    behaviours = json.loads(path.read_text()) if path.exists() else {}
    behaviour = str(behaviours.get(str(rank), "train"))
    stop = Stop()
    signal.signal(signal.SIGTERM, stop)
    if behaviour == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour.startswith("eat:"):
        # Beside the training, so that both go on where there is room.
        eaten = b"x" * (int(behaviour.removeprefix("eat:")) << 20)
        print(f"rank {rank} has eaten {len(eaten)} bytes", flush=True)
    if behaviour.startswith("exit:"):
        return int(behaviour.removeprefix("exit:"))
    if behaviour == "facts":
        print(json.dumps(facts()), flush=True)
    print(f"rank {rank} attempt {contract.attempt} starts", flush=True)
    box = Writer(
        contract.blackbox_path,
        rank=rank,
        world_size=contract.world_size,
        attempt=contract.attempt,
    )
    for mark in (StartMark.GROUPS_READY, StartMark.MODEL_READY, StartMark.RESTORED):
        box.mark(mark)
    box.resumed(max(0, contract.committed_step))
    if behaviour == "family":
        start_family(contract.data_dir / f"family-{rank}")
    if behaviour == "forked daemon":
        fork_daemon(contract.data_dir / f"family-{rank}")
    if behaviour == "garbage":
        return write_garbage(contract.blackbox_path)
    return train(box, behaviour, stop, first=max(0, contract.committed_step) + 1)


def train(box: Writer, behaviour: str, stop: Stop, *, first: int) -> int:
    box.phase(Phase.FORWARD_BACKWARD)
    last = int(behaviour.removeprefix("finish:")) if behaviour.startswith("finish:") else 10**9
    for step in range(first, last + 1):
        start_ns = node_time_ns()
        box.enter(Op.ALL_REDUCE, Group.DP)
        time.sleep(STEP_S)
        if behaviour == "raise" and step == 3:
            print("about to fail", file=sys.stderr)
            raise ValueError("loss is not finite at step 3")
        box.leave()
        box.completed(
            StepRecord(
                step=step,
                loss=1.0 / step,
                grad_norm=0.5,
                learning_rate=1e-3,
                tokens=64,
                start_ns=start_ns,
                end_ns=node_time_ns(),
                eval_loss=None,
            )
        )
        if stop.asked:
            return WorkerExitCode.STOPPED
    return 0


def start_family(path: Path) -> None:
    """A child, its own child, and a daemon; says who they are."""
    script = "sleep 1000 & echo $!; exec 1>&-; wait"
    child = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    # Its parent ends at once, so that it has left the worker's tree and group.
    daemon = subprocess.run(
        ["sh", "-c", "setsid sleep 1000 >/dev/null & echo $!"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    path.write_text(f"{child.pid} {grandchild} {int(daemon.stdout)}\n")


def fork_daemon(path: Path) -> None:
    """A process that leaves tree, group and session without an exec; says who it is."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            path.write_text(f"{os.getpid()}\n")
            time.sleep(1000)
        os._exit(0)
    os.wait()


def write_garbage(path: Path) -> int:
    """All that comes after the words that make it a black box, again and again."""
    with path.open("r+b") as file:
        while True:
            file.seek(64)
            file.write(b"\xab" * 40_000)
            file.flush()
            time.sleep(STEP_S)


def facts() -> dict[str, Any]:
    """What a worker can say about where it woke up."""
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return {
        "descriptors": descriptors,
        "process_group": os.getpgrp(),
        "pid": os.getpid(),
        "session": os.getsid(0),
        "modules": sorted(
            {name.partition(".")[0] for name in sys.modules} & {"grpc", "torch", "controller"}
        ),
        "collects_garbage": gc.isenabled(),
        "sigint_default": signal.getsignal(signal.SIGINT) is signal.SIG_DFL,
    }
