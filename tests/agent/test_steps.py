"""Where the time of a rank's last steps went, as its agent tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.agent.observe.steps import LastSteps
from outlast.blackbox import (
    Expected,
    Group,
    Op,
    Phase,
    Reader,
    StepRecord,
    StepUse,
    Writer,
    writer,
)


class Clock:
    """The box's clock, moved by hand."""

    def __init__(self) -> None:
        self.ns = 10**9

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(writer, "node_time_ns", found)
    return found


def train(box: Writer, clock: Clock, step: int, forward_ms: int) -> None:
    """A step: 5 ms of data, the passes, 3 ms for replicas in all, an update of 4 ms."""
    waits = {Phase.GRADIENT_SYNC: 2, Phase.OPTIMIZER: 1}
    lengths = {Phase.DATA: 5, Phase.FORWARD_BACKWARD: forward_ms, Phase.OPTIMIZER: 4}
    for phase in (Phase.DATA, Phase.FORWARD_BACKWARD, Phase.GRADIENT_SYNC, Phase.OPTIMIZER):
        box.phase(phase)
        clock.ns += 10**6 * lengths.get(phase, 0)
        if phase in waits:
            box.enter(Op.ALL_REDUCE, Group.DP)
            clock.ns += 10**6 * waits[phase]
            box.leave()
    forward_ns = 10**6 * forward_ms
    box.used(
        StepUse(
            forward_ns=forward_ns // 4,
            backward_ns=forward_ns // 2,
            busy_ns=forward_ns * 3 // 4,
            waited_ns=forward_ns // 4,
            peak_memory_bytes=1000,
        )
    )
    box.phase(Phase.EVALUATION)
    clock.ns += 10**9
    box.phase(Phase.GARBAGE_COLLECTION)
    clock.ns += 6 * 10**6
    box.completed(
        StepRecord(
            step=step,
            loss=1.0,
            grad_norm=1.0,
            learning_rate=0.1,
            tokens=8,
            start_ns=0,
            end_ns=clock.ns,
            eval_loss=None,
        )
    )


def test_steps_between_two_looks_are_told_as_one(tmp_path: Path, clock: Clock) -> None:
    box = Writer(tmp_path / "box", rank=0, world_size=2, attempt=1)
    box.resumed(7)
    box.expect(Expected(memory_bytes=2000, bubble=0.25))
    reader, told = Reader(tmp_path / "box"), LastSteps()
    told.look(reader)
    assert told.use is None
    train(box, clock, 8, forward_ms=400)
    told.look(reader)
    assert told.use is not None
    assert told.use.split.forward_s == pytest.approx(0.1)
    for step, forward_ms in ((9, 20), (10, 40)):
        train(box, clock, step, forward_ms)
    told.look(reader)
    split = told.use.split
    assert split.data_s == pytest.approx(0.005)
    assert (split.forward_s, split.backward_s) == pytest.approx((0.0075, 0.015))
    assert split.optimizer_s == pytest.approx(0.004)
    # Of the step before last and the one before: the last pass still goes on.
    assert split.garbage_collection_s == pytest.approx(0.006)
    assert split.dp_exposed_s == pytest.approx(0.003)
    assert (split.tp_exposed_s, split.pp_exposed_s, split.other_exposed_s) == (0, 0, 0)
    pipeline = (told.use.pipeline_busy_s, told.use.pipeline_waited_s)
    assert pipeline == pytest.approx((0.0225, 0.0075))
    assert (told.use.peak_memory_bytes, told.use.expected_memory_bytes) == (1000, 2000)
    assert told.use.expected_bubble == 0.25
    # Nothing new: the last words stand.
    before = told.use
    told.look(reader)
    assert told.use is before
