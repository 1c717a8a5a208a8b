"""What a rank's steps were spent on is kept as long as the steps themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from outlast.blackbox import (
    NUM_STEP_RECORDS,
    Group,
    Op,
    OpRecord,
    Pass,
    Phase,
    Reader,
    SpanRecord,
    StepPart,
    StepParts,
    Writer,
)
from outlast.blackbox.file import OPS_AT, PARTS_AT
from tests.step_records import step_record


@dataclass(slots=True)
class Rank:
    """A writer whose clock is turned by hand; what is not told lies in the present phase."""

    box: Writer
    now_ns: int = 1000
    step_began_ns: int = 1000

    def spend(self, phase: Phase, own_ns: int, *, waits_ns: int = 0) -> None:
        """A phase that begins now, with an operation at its end."""
        self.box.phase(phase)
        self.now_ns += own_ns
        if waits_ns:
            self.box.enter(Op.ALL_REDUCE, Group.DP)
            self.now_ns += waits_ns
            self.box.leave()

    def begin(self) -> None:
        self.box.begin_step()
        self.step_began_ns = self.now_ns

    def complete(self, step: int) -> None:
        self.box.completed(step_record(step, self.step_began_ns, self.now_ns))
        self.step_began_ns = self.now_ns


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank.blackbox"


@pytest.fixture
def rank(path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    found = Rank(Writer(path, rank=0, world_size=2, attempt=1, records=256))
    monkeypatch.setattr("outlast.blackbox.writer.node_time_ns", lambda: found.now_ns)
    return found


def a_pass(work: Pass, length_ns: int, waited_ns: int = 0) -> SpanRecord:
    return SpanRecord(
        phase=Phase.FORWARD_BACKWARD,
        work=work,
        micro_batch=0,
        start_ns=0,
        end_ns=length_ns,
        waited_ns=waited_ns,
    )


def spent(parts: StepParts) -> dict[StepPart, int]:
    return {part: ns for part, ns in zip(StepPart, parts.spent_ns, strict=True) if ns}


def test_a_step_is_split_by_its_phases_passes_and_operations(rank: Rank, path: Path) -> None:
    rank.box.phase(Phase.RESTORE)
    rank.now_ns += 500
    rank.begin()
    rank.spend(Phase.DATA, 20, waits_ns=5)
    rank.spend(Phase.FORWARD_BACKWARD, 100, waits_ns=30)
    rank.box.add_span(a_pass(Pass.FORWARD, 45, waited_ns=15))
    rank.box.add_span(a_pass(Pass.BACKWARD, 60, waited_ns=10))
    rank.box.add_span(a_pass(Pass.FORWARD, 10))
    rank.spend(Phase.GRADIENT_SYNC, 0, waits_ns=40)
    rank.spend(Phase.OPTIMIZER, 15)
    rank.complete(1)
    # Until the next step begins it is nobody's.
    rank.now_ns += 300
    (found,) = Reader(path).step_parts()
    assert (found.step, found.length_ns, found.waited_ns) == (1, 210, 75)
    assert spent(found) == {
        StepPart.DATA: 20,
        StepPart.FORWARD: 40,
        StepPart.BACKWARD: 50,
        StepPart.OPTIMIZER: 15,
    }


def test_what_follows_a_step_is_added_to_it(rank: Rank, path: Path) -> None:
    # Before the first there is none to add it to.
    rank.spend(Phase.CHECKPOINT, 9)
    for step in (1, 2, 3):
        rank.begin()
        rank.spend(Phase.OPTIMIZER, 50)
        rank.complete(step)
        if step != 3:
            rank.spend(Phase.CHECKPOINT, 10 * step, waits_ns=7)
        rank.spend(Phase.GARBAGE_COLLECTION, step)
    rank.box.phase(Phase.FINISHED)
    found = Reader(path).step_parts()
    assert [spent(each) for each in found] == [
        {StepPart.OPTIMIZER: 50, StepPart.CHECKPOINT: 10, StepPart.GARBAGE_COLLECTION: 1},
        {StepPart.OPTIMIZER: 50, StepPart.CHECKPOINT: 20, StepPart.GARBAGE_COLLECTION: 2},
        {StepPart.OPTIMIZER: 50, StepPart.GARBAGE_COLLECTION: 3},
    ]
    # It waits behind the step, which is no part of that.
    assert [each.waited_ns for each in found] == [0, 0, 0]


def test_a_step_that_is_left_out_has_nothing_of_the_one_before(rank: Rank, path: Path) -> None:
    """It is complete at once, while what follows the one before is still going on."""
    rank.begin()
    rank.spend(Phase.OPTIMIZER, 50)
    rank.complete(1)
    rank.spend(Phase.GARBAGE_COLLECTION, 70)
    rank.begin()
    rank.complete(2)
    rank.spend(Phase.GRADIENT_SYNC, 0, waits_ns=5)
    rank.begin()
    rank.complete(3)
    found = Reader(path).step_parts()
    assert [(each.length_ns, each.waited_ns) for each in found] == [(50, 0), (0, 0), (0, 0)]
    assert [spent(each) for each in found] == [
        {StepPart.OPTIMIZER: 50, StepPart.GARBAGE_COLLECTION: 70},
        {},
        {},
    ]


def test_a_script_that_says_no_beginnings_begins_where_the_step_before_ended(
    rank: Rank, path: Path
) -> None:
    rank.complete(1)
    for step in (2, 3):
        rank.spend(Phase.STEP, 10, waits_ns=step)
        rank.spend(Phase.DATA, 6)
        rank.spend(Phase.STEP, 4)
        rank.complete(step)
    found = Reader(path).step_parts()[1:]
    assert [(each.length_ns, each.waited_ns) for each in found] == [(22, 2), (23, 3)]
    assert [spent(each) for each in found] == [{StepPart.DATA: 6}] * 2


def test_operations_of_a_device_count_once_where_they_overlap(rank: Rank, path: Path) -> None:
    def device(start_ns: int, end_ns: int) -> None:
        rank.box.ended(
            OpRecord(
                op=Op.ALL_GATHER, group=Group.TP, seq=1, detail=-1, start_ns=start_ns, end_ns=end_ns
            )
        )

    rank.now_ns = 2000
    rank.begin()
    # One of the step before is noted late, one began there, and two overlap.
    for start_ns, end_ns in ((1500, 1900), (1900, 2010), (2100, 2150), (2120, 2180)):
        device(start_ns, end_ns)
    rank.now_ns = 2300
    rank.complete(1)
    (found,) = Reader(path).step_parts()
    assert found.waited_ns == 10 + 80


def test_as_many_are_kept_as_there_are_steps_whatever_has_become_of_operations(
    rank: Rank, path: Path
) -> None:
    for step in range(NUM_STEP_RECORDS + 7):
        for _ in range(3):
            rank.spend(Phase.DATA, 2, waits_ns=1)
        rank.complete(step)
    reader = Reader(path)
    found = reader.step_parts()
    assert [each.step for each in found] == [*range(7, NUM_STEP_RECORDS + 7)]
    assert {(each.waited_ns, *spent(each).values()) for each in found} == {(3, 6)}
    assert len(reader.ops()) == 256


def test_whatever_stands_in_the_ring_is_read_as_something(rank: Rank, path: Path) -> None:
    for step in range(5):
        rank.spend(Phase.DATA, 2)
        rank.complete(step)
    with path.open("r+b") as file:
        file.seek(PARTS_AT)
        file.write(b"\xff" * (OPS_AT - PARTS_AT))
    assert Reader(path).step_parts() == []
