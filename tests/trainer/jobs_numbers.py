"""What ranks do in tests of the numbers: train a little, and count what was allocated."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile

from outlast.blackbox import Group, Op, Phase, Reader, Writer
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from tests.trainer.ranks import RankContext
from trainer.data.node import NodeLoader
from trainer.parallel.mesh import build_mesh
from trainer.recovery.non_finite import NonFiniteLossError
from trainer.worker.loop import Agreed, TrainLoop
from trainer.worker.meter import PeakMemory
from trainer.worker.state import TrainState, build_state


class NoSaver:
    """A first stage of checkpoints that keeps nothing but what goes beside the last one."""

    newest_sealed = 0
    upload_busy = False
    is_replicated = False
    newest_replicated = -1
    replica_busy = False

    def __init__(self) -> None:
        self.extra: dict[str, Any] = {}

    def save(self, step: int, extra: dict[str, Any], **_: object) -> bool:
        self.extra = extra
        return True

    def wait_before_write(self, tensor: torch.Tensor) -> None:
        """Nothing reads it."""

    def finish(self, timeout_s: float | None = None) -> None:
        """Nothing is on its way."""


def memory_growth(context: RankContext, num_bytes: int) -> tuple[int, int]:
    """What the rank says of its memory before and after it uses `num_bytes` more."""
    # The ranks of a pool have done other tests, whose peak would hide this one's: forget it.
    Path("/proc/self/clear_refs").write_text("5")
    memory = PeakMemory(torch.device("cpu"))
    # The first operation of all makes some memory of its own.
    torch.ones(1)
    before = memory.read()
    used = torch.ones(num_bytes, dtype=torch.uint8)
    assert used[-1] == 1
    return before, memory.read()


def peak_bytes(context: RankContext, document: dict[str, Any], folder: Path) -> int:
    """The most bytes of tensors alive at once while a rank builds its model and trains it.

    Counted by torch's own allocator, temporaries inside operations included.
    """
    spec = parse_spec(document)
    box = _box(context, folder)
    # The profiler announces itself on the standard error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with profile(profile_memory=True) as counted:
        _, loop = _built(context, spec, box, folder)
        loop.run(0)
    box.close()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in counted.kineto_results.events()
        if event.name() == "[memory]"
    )
    alive = peak = 0
    for _, size in changes:
        alive += size
        peak = max(peak, alive)
    return peak


class _Counting(Writer):
    """A black box that counts operations by their group."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.entered: Counter[Group] = Counter()

    def enter(self, op: Op, group: Group, *about: int) -> int:
        self.entered[group] += 1
        return super().enter(op, group, *about)


def sent(
    context: RankContext, document: dict[str, Any], folder: Path
) -> dict[Group, tuple[int, int]]:
    """Bytes that a rank hands to each kind of group in the second step of a training, and waits."""
    box = _Counting(folder / f"{context.rank}.box", rank=context.rank, world_size=1, attempt=1)
    state, loop = _built(context, parse_spec(document), box, folder)
    loop.train_step(1)
    before, entered = _counted(state), Counter(box.entered)
    loop.train_step(2)
    found = {
        group: (count - before[group], box.entered[group] - entered[group])
        for group, count in _counted(state).items()
    }
    state.data_parallel.drain()
    state.data.train.close()
    box.close()
    return found


def losses(
    context: RankContext, document: dict[str, Any], folder: Path, data_socket: Path | None = None
) -> dict[str, Any]:
    """Losses of three steps and of the evaluation then; on one rank what the first must be.

    Data comes from the loader at `data_socket`, where one is given.
    """
    folder.mkdir(exist_ok=True)
    box = _box(context, folder)
    saver = NoSaver()
    node = None if data_socket is None else NodeLoader(data_socket, start_s=30.0)
    state, loop = _built(context, parse_spec(document), box, folder, saver, node)
    expected = 0.0
    if context.world_size == 1:
        batches = state.data.train.micro_batches(1)
        number = sum(int((each.targets >= 0).sum()) for each in batches)
        expected = float(state.eval_engine.run(batches, 1.0)) / number
    found = [loop.train_step(step).loss for step in (1, 2, 3)]
    state.data_parallel.drain()
    state.data.train.close()
    box.close()
    return {"loss": found, "expected": expected, "held_out": saver.extra["evaluation"]["loss"]}


def evaluations(
    context: RankContext, document: dict[str, Any], folder: Path
) -> list[tuple[float | None, dict[str, float]]]:
    """Of each step of a whole run its held-out loss and those of sets with names, from the box."""
    folder.mkdir(exist_ok=True)
    box = _box(context, folder)
    _, loop = _built(context, parse_spec(document), box, folder)
    loop.run(0)
    reader = Reader(folder / f"{context.rank}.box")
    found = [(each.eval_loss, dict(each.eval_losses)) for each in reader.new_steps()]
    reader.close()
    box.close()
    return found


def collections(
    context: RankContext, document: dict[str, Any], folder: Path
) -> tuple[list[int], bool, list[tuple[int, float]]]:
    """The steps after which the collector runs, 0 before the first; and whether it is on then.

    With them the passes that the black box has: after which step, and how many seconds.
    """
    folder.mkdir(exist_ok=True)
    box = _box(context, folder)
    _, loop = _built(context, parse_spec(document), box, folder)
    done, passes = [0], []
    train_step = loop.train_step

    def counted(step: int) -> Agreed:
        agreed = train_step(step)
        done.append(step)
        return agreed

    def note(phase: str, _info: object) -> None:
        if phase == "start":
            passes.append(done[-1])

    loop.train_step = counted  # type: ignore[method-assign]
    thresholds = gc.get_threshold()
    # On by itself it would run all the time.
    gc.disable()
    gc.set_threshold(10)
    gc.callbacks.append(note)
    try:
        gc.enable()
        passes.clear()
        loop.run(0)
        return passes, gc.isenabled(), _timed_passes(folder / f"{context.rank}.box")
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
        box.close()


def _timed_passes(path: Path) -> list[tuple[int, float]]:
    reader = Reader(path)
    ends = {record.end_ns: record.step for record in reader.new_steps()}
    found = [
        (max(step for ns, step in ends.items() if ns <= span.start_ns), span.end_ns - span.start_ns)
        for span in reader.spans()
        if span.phase is Phase.GARBAGE_COLLECTION
    ]
    total_s = reader.time_use().phases_s[Phase.GARBAGE_COLLECTION]
    assert total_s == pytest.approx(sum(ns for _, ns in found) / 1e9)
    reader.close()
    return [(step, ns / 1e9) for step, ns in found]


def _counted(state: TrainState) -> dict[Group, int]:
    comms = state.mesh.comms
    return {group: sum(comm.bytes_sent for comm in comms[group]) for group in comms}


def told_of_a_bad_gradient(
    context: RankContext, document: dict[str, Any], folder: Path, maker: int
) -> str:
    """What a rank says once the stage `maker` has made a gradient that is not a number."""
    box = _box(context, folder)
    state, loop = _built(context, parse_spec(document), box, folder)
    finish = state.data_parallel.finish_gradients

    def finish_after_a_fault() -> None:
        # It flows on to the stages before.
        for part in state.flat.parts if state.mesh.at.pp <= maker else ():
            part.grads.fill_(torch.nan)
        finish()

    setattr(state.data_parallel, "finish_gradients", finish_after_a_fault)  # noqa: B010
    with pytest.raises(NonFiniteLossError) as error:
        loop.train_step(1)
    box.close()
    return str(error.value)


def _box(context: RankContext, folder: Path) -> Writer:
    return Writer(folder / f"{context.rank}.box", rank=context.rank, world_size=1, attempt=1)


def _built(
    context: RankContext,
    spec: JobSpec,
    box: Writer,
    folder: Path,
    saver: NoSaver | None = None,
    node: NodeLoader | None = None,
) -> tuple[TrainState, TrainLoop]:
    """A rank's model with its first weights, and what trains it."""
    mesh = build_mesh(
        spec.layout,
        context.rank,
        store=context.store(),
        device=torch.device("cpu"),
        timeout_s=60,
        recorder=box,
        tied_embeddings=spec.model.tied_embeddings,
        folds=spec.parallel.folds,
        gloo_interface="lo",
    )
    state = build_state(spec, mesh, folder / "data", node)
    state.flat.initialise(spec.seed)
    return state, TrainLoop(state, box, saver or NoSaver(), stop_requested=lambda: False)
