"""What a step used: passes without their waits, messages hidden and sent, memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from outlast.blackbox import Group, Pass, SpanRecord
from outlast.clock import node_time_ns
from tests.trainer.jobs_numbers import memory_growth
from tests.trainer.ranks import RankPool
from trainer.parallel import timeline
from trainer.parallel.timeline import HostTimeline
from trainer.worker.meter import PeakMemory, StepMeter


@dataclass
class Messages:
    waited_ns: int = 0
    in_flight_ns: int = 0
    bytes_sent: int = 0


@dataclass
class Timing:
    busy_s: float = 0.3
    waited_s: float = 0.1


@dataclass
class Heard:
    """A listener that keeps what it was told."""

    calls: list[str] = field(default_factory=list)

    def before_forward(self, chunk: int, micro_batch: int) -> None:
        self.calls.append(f"before forward {chunk} {micro_batch}")

    def after_forward(self, chunk: int, micro_batch: int) -> None:
        self.calls.append(f"after forward {chunk} {micro_batch}")

    def before_backward(self, chunk: int, micro_batch: int) -> None:
        self.calls.append(f"before backward {chunk} {micro_batch}")

    def after_backward(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        self.calls.append(f"after backward {chunk} {micro_batch} {last}")

    def after_inputs(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        self.calls.append(f"after inputs {chunk} {micro_batch} {last}")

    def before_weights(self, chunk: int, micro_batch: int) -> None:
        self.calls.append(f"before weights {chunk} {micro_batch}")

    def after_weights(self, chunk: int, micro_batch: int) -> None:
        self.calls.append(f"after weights {chunk} {micro_batch}")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [0]
    monkeypatch.setattr(timeline.time, "monotonic_ns", lambda: now[0])
    return now


def test_passes_are_timed_without_what_they_waited_for(clock: list[int]) -> None:
    tensor, replicas, heard = Messages(), Messages(), Heard()
    groups = {Group.TP: [tensor], Group.DP: [replicas]}
    found = StepMeter(groups, PeakMemory(torch.device("cpu")), HostTimeline(), heard)
    for micro_batch in range(2):
        found.before_forward(1, micro_batch)
        clock[0] += 100
        tensor.waited_ns += 30
        tensor.in_flight_ns += 70
        found.after_forward(1, micro_batch)
        clock[0] += 1000
        found.before_backward(1, micro_batch)
        clock[0] += 200
        replicas.in_flight_ns += 50
        replicas.bytes_sent += 64
        found.after_backward(1, micro_batch, last=micro_batch == 1)
    use = found.take(Timing())
    assert (use.forward_ns, use.backward_ns) == (140, 400)
    assert use.hidden_ns == {Group.TP: 80, Group.DP: 100}
    assert use.sent_bytes == {Group.TP: 0, Group.DP: 128}
    assert (use.busy_ns, use.waited_ns) == (300_000_000, 100_000_000)
    assert (use.data_wait_ns, use.data_waits) == (0, 0)
    waited = found.take(Timing(), data_wait_ns=5)
    assert (waited.data_wait_ns, waited.data_waits) == (5, 1)
    assert heard.calls[:2] == ["before forward 1 0", "after forward 1 0"]
    assert heard.calls[-1] == "after backward 1 1 True"


def test_both_parts_of_a_split_backward_count_as_one(clock: list[int]) -> None:
    heard = Heard()
    found = StepMeter({}, PeakMemory(torch.device("cpu")), HostTimeline(), heard)
    found.before_backward(0, 1)
    clock[0] += 200
    found.after_inputs(0, 1, last=True)
    clock[0] += 1000
    found.before_weights(0, 1)
    clock[0] += 50
    found.after_weights(0, 1)
    assert found.take(Timing()).backward_ns == 250
    parts = [
        "before backward 0 1",
        "after inputs 0 1 True",
        "before weights 0 1",
        "after weights 0 1",
    ]
    assert heard.calls == parts


def test_each_step_counts_for_itself(clock: list[int]) -> None:
    stages = Messages(bytes_sent=500, in_flight_ns=9)
    groups = {Group.PP: [stages]}
    found = StepMeter(groups, PeakMemory(torch.device("cpu")), HostTimeline())
    assert found.take(Timing()).sent_bytes == {Group.PP: 0}
    passes: list[SpanRecord] = []
    found.begin(passes.append)
    found.before_forward(0, 0)
    clock[0] += 5
    found.after_forward(0, 0)
    stages.bytes_sent += 8
    use = found.take(Timing())
    assert (use.forward_ns, use.sent_bytes) == (5, {Group.PP: 8})
    # An evaluation between two steps belongs to neither.
    stages.bytes_sent += 100
    found.begin(passes.append)
    last = found.take(Timing())
    assert (last.forward_ns, last.sent_bytes) == (0, {Group.PP: 0})
    assert len(passes) == 1


def test_each_pass_is_noted_as_it_ends(clock: list[int]) -> None:
    stages = Messages()
    found = StepMeter({Group.PP: [stages]}, PeakMemory(torch.device("cpu")), HostTimeline())
    passes: list[SpanRecord] = []
    found.begin(passes.append)
    since_ns = node_time_ns()
    for micro_batch in (0, 1):
        found.before_forward(1, micro_batch)
        clock[0] += 7
        stages.waited_ns += 3
        found.after_forward(1, micro_batch)
    found.before_backward(0, 1)
    clock[0] += 9
    found.after_backward(0, 1, last=True)
    assert [(each.work, each.chunk, each.micro_batch) for each in passes] == [
        (Pass.FORWARD, 1, 0),
        (Pass.FORWARD, 1, 1),
        (Pass.BACKWARD, 0, 1),
    ]
    assert [(each.start_ns - since_ns, each.end_ns - since_ns) for each in passes] == [
        (0, 7),
        (7, 14),
        (14, 23),
    ]
    assert [each.waited_ns for each in passes] == [3, 3, 0]


def test_peak_of_memory_grows_with_what_is_used(ranks: RankPool) -> None:
    num_bytes = 2**26
    (before, after) = ranks.run(memory_growth, 1, num_bytes)[0]
    # Pages are counted in batches, and some were there before.
    assert after - before == pytest.approx(num_bytes, rel=0.1)
