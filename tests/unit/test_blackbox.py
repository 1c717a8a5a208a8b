"""The black box: what a rank noted is there for others, even after its death."""

from __future__ import annotations

import math
import os
import signal
import struct
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from controller.agent.observe.rank_times import measured_times, rank_times
from outlast.blackbox import (
    NUM_STEP_RECORDS,
    BlackBoxError,
    Expected,
    Group,
    Op,
    OpRecord,
    Pass,
    Phase,
    Reader,
    SpanRecord,
    StartMark,
    StepRecord,
    StepUse,
    Writer,
    bubble_of,
    open_black_box,
)
from outlast.blackbox.file import IDENTITY, OPS_AT, Rings
from outlast.trace.heat import Measure
from outlast.worker_contract import BLACK_BOX_RECORDS, MOST_BLACK_BOX_RECORDS
from tests.contracts import contract_of


def step_record(step: int, eval_loss: float | None = None) -> StepRecord:
    return StepRecord(
        step=step,
        loss=1.0 / (step + 1),
        grad_norm=0.5,
        learning_rate=1e-3,
        tokens=128,
        start_ns=step,
        end_ns=step + 1,
        eval_loss=eval_loss,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank.blackbox"


def test_present_says_who_and_where(path: Path) -> None:
    writer = Writer(path, rank=3, world_size=8, attempt=2)
    writer.resumed(40)
    writer.phase(Phase.FORWARD_BACKWARD)
    present = Reader(path).present()
    assert (present.rank, present.attempt, present.pid) == (3, 2, os.getpid())
    assert (present.completed_step, present.resumed_step) == (40, 40)
    assert present.phase is Phase.FORWARD_BACKWARD


def test_use_of_steps_adds_up_beside_what_was_expected(path: Path) -> None:
    writer = Writer(path, rank=0, world_size=1, attempt=1)
    reader = Reader(path)
    assert reader.expected() is None
    assert reader.step_use() == StepUse()
    writer.expect(Expected(memory_bytes=2**30, bubble=0.25))
    for peak in (100, 120):
        writer.used(
            StepUse(
                forward_ns=10,
                backward_ns=20,
                busy_ns=30,
                waited_ns=10,
                hidden_ns={Group.TP: 5, Group.DP: 0},
                sent_bytes={Group.TP: 64, Group.DP: 32},
                data_wait_ns=7,
                data_waits=1,
                peak_memory_bytes=peak,
            )
        )
    use = reader.step_use()
    assert (use.forward_ns, use.backward_ns) == (20, 40)
    assert (use.busy_ns, use.waited_ns) == (60, 20)
    assert use.hidden_ns == {Group.TP: 10}
    assert (use.data_wait_ns, use.data_waits) == (14, 2)
    assert use.sent_bytes == {Group.TP: 128, Group.DP: 64}
    assert use.peak_memory_bytes == 120
    assert reader.expected() == Expected(memory_bytes=2**30, bubble=0.25)
    # A box that is opened again belongs to another process.
    Writer(path, rank=0, world_size=1, attempt=2)
    assert Reader(path).step_use() == StepUse()


def test_operation_entered_but_not_left_is_visible(path: Path) -> None:
    writer = Writer(path, rank=0, world_size=1, attempt=1)
    reader = Reader(path)
    assert reader.present().last_operation is None
    assert writer.enter(Op.ALL_REDUCE, Group.DP) == 1
    assert str(reader.present().last_operation) == "in dp all_reduce #1"
    writer.leave()
    assert str(reader.present().last_operation) == "after dp all_reduce #1"
    assert writer.enter(Op.RECV, Group.PP, detail=2) == 1
    assert [record.op for record in reader.ops()] == [Op.ALL_REDUCE]


def test_a_message_is_kept_with_its_other_end_and_when_it_left(path: Path) -> None:
    writer = Writer(path, rank=0, world_size=1, attempt=1)
    reader = Reader(path)
    writer.enter(Op.RECV, Group.PP, 2, 3, 4)
    assert reader.present().peer == 3
    writer.leave()
    writer.enter(Op.SEND, Group.PP, 2, 1, 5)
    left_ns = reader.present().op_entered_ns - 7
    writer.leave(left_ns)
    # It left when it was waited for: the wait has all of its time.
    writer.enter(Op.ALL_REDUCE, Group.DP)
    writer.leave(reader.present().op_entered_ns + 1)
    found = [(each.detail, each.peer, each.message, each.departed_ns) for each in reader.ops()]
    assert found == [(2, 3, 4, 0), (2, 1, 5, left_ns), (-1, -1, -1, 0)]


def a_pass(micro_batch: int) -> SpanRecord:
    return SpanRecord(
        phase=Phase.FORWARD_BACKWARD,
        work=Pass.BACKWARD,
        chunk=1,
        micro_batch=micro_batch,
        start_ns=micro_batch,
        end_ns=micro_batch + 5,
        waited_ns=2,
    )


def test_phases_are_kept_with_what_they_waited_and_passes_beside_them(path: Path) -> None:
    writer = Writer(path, rank=0, world_size=1, attempt=1)
    reader = Reader(path)
    writer.phase(Phase.FORWARD_BACKWARD)
    writer.add_span(a_pass(3))
    writer.enter(Op.ALL_REDUCE, Group.DP)
    writer.leave()
    writer.phase(Phase.OPTIMIZER)
    writer.phase(Phase.DATA)
    start, one, computed, update = reader.spans()
    assert one == a_pass(3)
    assert [each.phase for each in (start, computed, update)] == [
        Phase.STARTING,
        Phase.FORWARD_BACKWARD,
        Phase.OPTIMIZER,
    ]
    (operation,) = reader.ops()
    assert computed.waited_ns == operation.end_ns - operation.start_ns
    assert (start.waited_ns, update.waited_ns) == (0, 0)
    # The next begins where the one before ends, and the last is still going on.
    assert (start.end_ns, computed.end_ns) == (computed.start_ns, update.start_ns)
    assert update.end_ns == reader.present().phase_since_ns
    assert (update.work, update.micro_batch) == (Pass.NONE, -1)


def test_operations_of_any_phase_and_group_are_counted_as_such_and_as_nothing_else(
    path: Path,
) -> None:
    writer = Writer(path, rank=0, world_size=1, attempt=1)
    for phase in Phase:
        writer.phase(phase)
        for group in Group:
            writer.enter(Op.ALL_REDUCE, group)
            writer.leave()
    reader = Reader(path)
    use = reader.step_use()
    totals = (use.forward_ns, use.backward_ns, use.busy_ns, use.waited_ns, use.data_wait_ns)
    assert (totals, use.hidden_ns, use.sent_bytes) == ((0,) * 5, {}, {})
    assert (use.data_waits, use.peak_memory_bytes, reader.expected()) == (0, 0, None)
    assert reader.present().entered == dict.fromkeys(Group, len(Phase))
    lengths_s: dict[tuple[Phase, Group], float] = {}
    starts = [(each.start_ns, each.phase) for each in reader.spans()]
    starts.append((reader.present().phase_since_ns, reader.present().phase))
    for each in reader.ops():
        phase = max(start for start in starts if start[0] <= each.start_ns)[1]
        lengths_s[phase, each.group] = (each.end_ns - each.start_ns) / 1e9
    assert reader.time_use().operations_s == lengths_s


def test_as_many_records_are_kept_as_a_job_asks_for(path: Path) -> None:
    writer = Writer(path, rank=0, world_size=1, attempt=1, records=300)
    reader = Reader(path)
    for number in range(310):
        writer.enter(Op.SEND, Group.PP, number)
        writer.leave()
        writer.add_span(a_pass(number))
    assert [each.detail for each in reader.ops()] == list(range(10, 310))
    assert [each.micro_batch for each in reader.spans()] == list(range(10, 310))
    default = path.with_name("default")
    Writer(default, rank=0, world_size=1, attempt=1)
    assert default.stat().st_size - path.stat().st_size == 104 * (BLACK_BOX_RECORDS - 300)
    # A box that is opened again with another length is read anew.
    Writer(path, rank=0, world_size=1, attempt=2)
    with pytest.raises(BlackBoxError, match="bytes, expected"):
        reader.spans()
    assert Reader(path).spans() == []


@pytest.mark.parametrize(
    ("document", "records"),
    [
        ('{"resources": {"black_box_records": 300}}', 300),
        # Of a controller that does not know the setting.
        ('{"resources": {}}', BLACK_BOX_RECORDS),
        ("{}", BLACK_BOX_RECORDS),
    ],
)
def test_a_worker_opens_its_box_as_its_job_asks_for(
    tmp_path: Path, document: str, records: int
) -> None:
    contract = replace(contract_of(tmp_path), spec_json=document)
    writer = open_black_box(contract)
    for number in range(records + 5):
        writer.add_span(a_pass(number))
    assert len(Reader(contract.blackbox_path).spans()) == records


def test_what_a_device_does_is_not_waited_for_by_the_phase_that_learns_of_it(path: Path) -> None:
    writer = Writer(path, rank=0, world_size=1, attempt=1)
    operation = OpRecord(
        op=Op.ALL_REDUCE, group=Group.DP, seq=1, detail=-1, start_ns=1, end_ns=10**12
    )
    writer.ended(operation)
    writer.phase(Phase.DATA)
    (started,) = Reader(path).spans()
    assert started.waited_ns == 0


def test_anything_may_stand_in_the_rings_and_is_read_as_something(path: Path) -> None:
    writer = Writer(path, rank=0, world_size=1, attempt=1, records=256)
    for number in range(256):
        writer.enter(Op.SEND, Group.PP, number)
        writer.leave()
        writer.add_span(a_pass(number))
    random = Random(7)
    reader = Reader(path)
    whole = path.read_bytes()
    for _ in range(300):
        with path.open("r+b") as file:
            at = random.randrange(OPS_AT, len(whole) - 64)
            file.seek(at)
            file.write(random.randbytes(64))
        for each in (*reader.spans(), *reader.ops()):
            assert each.start_ns >= 0
        rank_times(path)
        rank_times(path, range(1, 3))
        for measure in Measure:
            measured_times(path, measure, 10)


@pytest.mark.parametrize("records", [0, -1, MOST_BLACK_BOX_RECORDS + 1])
def test_a_length_that_no_box_has_is_refused(path: Path, records: int) -> None:
    Writer(path, rank=0, world_size=1, attempt=1)
    with path.open("r+b") as file:
        file.seek(IDENTITY.size - 8)
        file.write(struct.pack("<q", records))
    with pytest.raises(BlackBoxError, match=f"{records} records"):
        Reader(path)


def test_idle_time_after_the_last_action_is_part_of_the_bubble() -> None:
    """Two stages, two micro-batches, 1F1B: a third of the time by theory.

    The last stage waits for its first input, and idles while the first runs its last backward.
    """
    first = (600, 300)
    last = (600, 100)
    assert bubble_of([first, last]) == pytest.approx(1 / 3)
    assert bubble_of([(600, 0)]) == 0
    assert bubble_of([]) is None
    assert bubble_of([(0, 0)]) is None


def test_each_step_record_is_read_once_and_bitwise(path: Path) -> None:
    writer = Writer(path, rank=0, world_size=1, attempt=1)
    reader = Reader(path)
    records = [step_record(1), step_record(2, eval_loss=0.1 + 0.2)]
    for record in records:
        writer.completed(record)
    assert reader.new_steps() == records
    assert reader.new_steps() == []


def test_losses_of_held_out_sets_come_with_their_step_bitwise(path: Path) -> None:
    writer = Writer(path, rank=0, world_size=1, attempt=1)
    reader = Reader(path)
    names = [f"{number:02}{'n' * 46}" for number in range(16)]
    records = [
        replace(step_record(step, eval_loss=0.3), eval_losses=dict.fromkeys(names, 0.1 + step))
        for step in range(1, 40)
    ]
    for record in (*records[:3], step_record(40)):
        writer.completed(record)
    assert reader.new_steps() == [*records[:3], step_record(40)]
    # A set that has none, and the mean with it, hides no other.
    losses = {"code": math.nan, "web": 2.5}
    writer.completed(replace(step_record(41, eval_loss=math.nan), eval_losses=losses))
    (found,) = reader.new_steps()
    assert found.eval_loss is not None
    assert math.isnan(found.eval_loss)
    assert found.eval_losses["web"] == 2.5
    assert math.isnan(found.eval_losses["code"])
    for record in records[3:]:
        writer.completed(record)
    # One that is far behind gets the losses of the last 7 evaluations of 16 sets.
    assert [len(each.eval_losses) for each in reader.new_steps()] == [0] * 29 + [16] * 7


def test_reader_that_falls_behind_gets_the_newest_records(path: Path) -> None:
    writer = Writer(path, rank=0, world_size=1, attempt=1)
    reader = Reader(path)
    for step in range(NUM_STEP_RECORDS + 10):
        writer.completed(step_record(step))
    steps = [record.step for record in reader.new_steps()]
    assert steps == list(range(10, NUM_STEP_RECORDS + 10))


def test_the_newest_thousand_steps_are_kept(path: Path) -> None:
    assert NUM_STEP_RECORDS >= 1000
    # All there is to a box where a job asks for no other number.
    assert Rings().file_bytes < 600_000


def test_marks_of_the_start_are_kept(path: Path) -> None:
    writer = Writer(path, rank=0, world_size=1, attempt=1)
    writer.mark(StartMark.FORKED, 7)
    writer.mark(StartMark.RESTORED, 9)
    assert Reader(path).marks() == {StartMark.FORKED: 7, StartMark.RESTORED: 9}


def test_record_survives_sigkill_of_the_writer(path: Path) -> None:
    child = os.fork()
    if child == 0:
        writer = Writer(path, rank=1, world_size=2, attempt=5)
        writer.completed(step_record(12))
        writer.enter(Op.ALL_GATHER, Group.TP)
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    reader = Reader(path)
    assert reader.present().completed_step == 12
    assert str(reader.present().last_operation) == "in tp all_gather #1"
    assert [record.step for record in reader.new_steps()] == [12]


def test_file_of_another_kind_is_refused(path: Path) -> None:
    path.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="100 bytes"):
        Reader(path)


def test_file_that_is_not_open_yet_is_not_found(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Reader(path)
