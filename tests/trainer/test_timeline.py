"""Moments of a device that does later what it is given, played by a queue.

What a fake cannot show, that CUDA's events stand where the trainer takes them to be, no
test here shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.blackbox import Group, Op, Reader, Writer
from trainer.parallel import timeline
from trainer.parallel.comm import BackendComm, Waited
from trainer.parallel.timeline import DeviceSilentError, DeviceTimeline, timed
from trainer.worker.meter import PeakMemory, StepMeter

WALL_NS = 1_000_000_000_000


@dataclass
class Device:
    """Does what it is given in order, each in its own time; `stuck_at` never ends."""

    given_ms: list[float] = field(default_factory=list)
    done: int = 0
    stuck_at: int = 10**9

    def give(self, ms: float) -> None:
        self.given_ms.append(ms)

    def reach(self, position: int) -> None:
        if position > self.stuck_at:
            raise RuntimeError("the device hangs")
        self.done = max(self.done, position)

    def now_ns(self) -> int:
        """The wall clock, which here goes by what the device has done."""
        return WALL_NS + round(1e6 * sum(self.given_ms[: self.done]))


class FakeEvent:
    """After what the device has been given when it is recorded."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._position = 0

    def record(self) -> None:
        self._position = len(self._device.given_ms)

    def query(self) -> bool:
        return self._device.done >= self._position

    def synchronize(self) -> None:
        self._device.reach(self._position)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query()
        assert end_event.query()
        return sum(self._device.given_ms[self._position : end_event._position])


class _Given:
    """A message that takes the device some time."""

    def __init__(self, device: Device, ms: float) -> None:
        self._device, self._ms = device, ms

    def wait(self) -> None:
        self._device.give(self._ms)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(timeline, "node_time_ns", found.now_ns)
    return found


@pytest.fixture
def box(tmp_path: Path) -> Iterator[tuple[Writer, Reader]]:
    writer = Writer(tmp_path / "box", rank=0, world_size=2, attempt=1)
    reader = Reader(tmp_path / "box")
    yield writer, reader
    reader.close()
    writer.close()


def _late(device: Device) -> DeviceTimeline:
    return DeviceTimeline(lambda: FakeEvent(device))


def _comm(writer: Writer, moments: DeviceTimeline) -> BackendComm:
    nothing: Any = None
    return BackendComm(
        nothing, group=Group.TP, ranks=(0, 1), index=0, recorder=writer, timeline=moments
    )


def test_a_moment_is_told_when_the_device_has_passed_it_and_not_before(device: Device) -> None:
    moments = _late(device)
    told: list[int] = []
    for ms in (3.0, 4.0):
        device.give(ms)
        moments.stamp(told.append)
    assert told == []
    device.done = 1
    moments.stamp(told.append)
    assert told == [WALL_NS + 3_000_000]
    moments.finish()
    assert told == [WALL_NS + ms * 1_000_000 for ms in (3, 7, 7)]


def test_moments_of_a_step_that_was_given_up_are_not_told(device: Device) -> None:
    moments = _late(device)
    told: list[int] = []
    device.give(3.0)
    moments.stamp(told.append)
    device.give(4.0)
    moments.forget()
    moments.finish()
    assert told == []
    device.give(1.0)
    moments.stamp(told.append)
    moments.finish()
    assert told == [WALL_NS + 8_000_000]


def test_events_are_used_again(device: Device) -> None:
    made: list[FakeEvent] = []

    def new_event() -> FakeEvent:
        made.append(FakeEvent(device))
        return made[-1]

    moments = DeviceTimeline(new_event)
    for _ in range(50):
        device.give(1.0)
        with timed(moments, lambda ns: None):
            device.give(1.0)
        moments.finish()
    assert len(made) <= 4


def test_the_hosts_clock_is_taken_over_after_each_wait(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or clocks that drift by a second a day would tear ranks of different nodes apart."""
    moments = _late(device)
    device.give(5.0)
    monkeypatch.setattr(timeline, "node_time_ns", lambda: WALL_NS + 9_000_000)
    moments.finish()
    told: list[int] = []
    device.give(2.0)
    moments.stamp(told.append)
    moments.finish()
    assert told == [WALL_NS + 11_000_000]


def test_passes_and_waits_have_the_devices_times(
    device: Device, box: tuple[Writer, Reader]
) -> None:
    writer, reader = box
    moments = _late(device)
    comm = _comm(writer, moments)
    meter = StepMeter({Group.TP: [comm]}, PeakMemory(torch.device("cpu")), moments)
    meter.begin(writer.add_span)
    for before, wait, after in ((10.0, 3.0, 5.0), (20.0, 1.0, 0.0)):
        meter.before_forward(0, 0)
        departure = comm.departed()
        device.give(before)
        comm.wait([_Given(device, wait)], Op.ALL_GATHER, Waited(detail=7, departure=departure))
        comm.landed()
        device.give(after)
        meter.after_forward(0, 0)
    assert comm.waited_ns == 0
    moments.finish()
    assert (comm.waited_ns, comm.in_flight_ns) == (4_000_000, 34_000_000)
    use = meter.take(_Timing())
    assert use.forward_ns == 35_000_000
    assert use.hidden_ns == {Group.TP: 30_000_000}
    assert [(op.op, op.seq, op.detail) for op in reader.ops()] == [
        (Op.ALL_GATHER, 1, 7),
        (Op.ALL_GATHER, 2, 7),
    ]
    spans = [(op.start_ns - WALL_NS, op.end_ns - WALL_NS) for op in reader.ops()]
    assert spans == [(10_000_000, 13_000_000), (38_000_000, 39_000_000)]
    assert [op.departed_ns - WALL_NS for op in reader.ops()] == [0, 18_000_000]
    passes = [(p.start_ns - WALL_NS, p.end_ns - WALL_NS, p.waited_ns) for p in reader.spans()]
    assert passes == [(0, 18_000_000, 3_000_000), (18_000_000, 39_000_000, 1_000_000)]


def test_a_device_that_hangs_is_seen_in_the_operation_it_hangs_in(
    device: Device, box: tuple[Writer, Reader]
) -> None:
    """Three are given; the second never ends. Before the host waits, it names the last."""
    writer, reader = box
    moments = _late(device)
    comm = _comm(writer, moments)
    for _ in range(3):
        device.give(1.0)
        comm.wait([_Given(device, 1.0)], Op.ALL_REDUCE)
    device.stuck_at = 3
    assert str(reader.present().last_operation) == "in tp all_reduce #3"
    writer.waits_for_device()
    with pytest.raises(RuntimeError, match="hangs"):
        moments.finish()
    assert str(reader.present().last_operation) == "in tp all_reduce #2"
    assert reader.present().op_entered_ns == WALL_NS + 3_000_000
    assert [op.seq for op in reader.ops()] == [1]


def test_a_device_that_hangs_in_its_own_work_is_seen_after_an_operation(
    device: Device, box: tuple[Writer, Reader]
) -> None:
    """Its peers are in the next one, so this rank is the culprit."""
    writer, reader = box
    moments = _late(device)
    comm = _comm(writer, moments)
    for _ in range(2):
        device.give(1.0)
        comm.wait([_Given(device, 1.0)], Op.ALL_REDUCE)
    moments.finish()
    device.give(1.0)
    comm.wait([_Given(device, 1.0)], Op.ALL_REDUCE)
    device.stuck_at = 4
    writer.waits_for_device()
    with pytest.raises(RuntimeError, match="hangs"):
        moments.finish()
    assert str(reader.present().last_operation) == "after tp all_reduce #2"


def test_the_end_of_a_job_waits_for_the_device_within_a_limit(device: Device) -> None:
    moments = _late(device)
    moments.finish(timeout_s=0.0)
    device.give(1.0)
    with pytest.raises(DeviceSilentError, match="black box"):
        moments.finish(timeout_s=0.0)


@dataclass
class _Timing:
    busy_s: float = 0.0
    waited_s: float = 0.0
