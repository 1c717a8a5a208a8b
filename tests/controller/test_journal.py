"""The journal on a real file: durable, whole, and only ever one writer's."""

from __future__ import annotations

import json
import math
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from controller.convert import plan_of
from controller.core import events as ev
from controller.core.changes import NodePut, State, StateChange
from controller.core.codec import encode_change
from controller.core.effects import Persist, SendCommand
from controller.core.machine import Machine
from controller.core.node_events import NodeJoined, WorkerExited
from controller.core.orders import StartWorkers, StopWorkers
from controller.core.records import NodeRecord
from controller.core.settings import Settings
from controller.core.states import NodeState
from controller.store.backend import DatabaseError
from controller.store.curves import Curves, StepRow
from controller.store.database import Database, DeposedError
from controller.store.journal import Journal
from controller.store.lock import LockedError, StateLock
from outlast.clock import SystemClock
from outlast.failures import ErrorKind, FailureClass
from outlast.ids import JobId, NodeId
from outlast.spec.parse import parse_spec
from outlast.v1 import common_pb2
from tests.controller.fakes import spec_document

BATCH = 7
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def opened(path: Path, *, snapshot_least_bytes: int = 2**20) -> Iterator[Journal]:
    database = Database(path)
    try:
        yield Journal(database, SystemClock(), snapshot_least_bytes=snapshot_least_bytes)
    finally:
        database.close()


def node_put(name: str, reason: str = "joined") -> NodePut:
    return NodePut(
        node=NodeRecord(
            node=NodeId(name),
            state=NodeState.READY,
            since_s=1.5,
            reason=reason,
            incarnation="i",
            address="127.0.0.1",
            rendezvous_port=1,
            workers=1,
        )
    )


def story() -> Iterator[ev.Event]:
    """A job that loses a worker, restarts and succeeds."""
    spec = parse_spec(spec_document())
    job_id = JobId("tiny-abcde")
    yield ev.ControllerStarted(term=1)
    for name in ("n0", "n1"):
        yield NodeJoined(
            node=NodeId(name),
            incarnation="i",
            address="127.0.0.1",
            rendezvous_port=1,
            workers=1,
            statuses=(),
        )
    yield ev.JobSubmitted(
        job_id=job_id,
        name="tiny",
        request_id="r",
        spec_json=spec.canonical_json(),
        checkpoint_url="file:///x",
        plan=plan_of(spec),
    )


def test_fold_of_the_journal_is_the_state_after_every_event(tmp_path: Path) -> None:
    """Crash after any commit: what is loaded is what was decided. Issue: durable before
    visible; the fold equals the state after a crash at any point."""
    path = tmp_path / "journal.sqlite"
    with opened(path, snapshot_least_bytes=100) as journal:
        journal.take_over()
        machine = Machine(journal.load(), Settings())
        queue = list(story())
        num_snapshots = 0
        for number in range(200):
            if not queue:
                break
            for effect in machine.handle(queue.pop(0), 1000.0 + number):
                if isinstance(effect, Persist):
                    journal.append(effect.changes)
                elif isinstance(effect, SendCommand):
                    queue.extend(_answers(machine, effect))
            if journal.snapshot_is_due():
                journal.write_snapshot(machine.state)
                num_snapshots += 1
            # Another process would see exactly this.
            with opened(path) as reader:
                assert reader.load() == machine.state
        assert num_snapshots > 2
        assert [job.state for job in machine.state.jobs.values()] == ["SUCCEEDED"]


def _answers(machine: Machine, sent: SendCommand) -> list[ev.Event]:
    """What a healthy agent says; the first attempt loses a worker."""
    command = sent.command
    done = ev.CommandFinished(
        command_id=command.command_id,
        node=command.node,
        ok=True,
        error_kind=ErrorKind.NONE,
        detail="",
        verdict="pass",
        completed_step=3 if isinstance(command.command, StopWorkers) else -1,
    )
    answers: list[ev.Event] = [done]
    if isinstance(command.command, StartWorkers):
        assert command.job is not None
        assert sent.start is not None
        answers.append(
            ev.JobAdvanced(
                job_id=command.job,
                attempt=command.attempt,
                completed_step=command.attempt * 4,
                resumed_step=0,
                at_s=1001.0,
            )
        )
        is_faulty = command.attempt == 1 and command.node == "n0"
        num_steps = machine.state.jobs[command.job].plan.total_steps
        answers.append(
            WorkerExited(
                job_id=command.job,
                attempt=command.attempt,
                node=command.node,
                rank=sent.start.ranks[0],
                code=-9 if is_faulty else 0,
                fault_class=FailureClass.KILLED_BY_SIGNAL if is_faulty else FailureClass.CLEAN,
                fingerprint="",
                detail="",
                traceback="",
                completed_step=3 if is_faulty else num_steps,
                at_s=1000.0,
            )
        )
        if not is_faulty and command.node == "n0":
            answers.append(ev.CheckpointCommitted(job_id=command.job, step=num_steps))
    return answers


def test_snapshot_drops_the_changes_that_it_holds(tmp_path: Path) -> None:
    with opened(tmp_path / "j", snapshot_least_bytes=1_000) as journal:
        journal.take_over()
        state = journal.load()
        num_after, num_snapshots = 0, 0
        for number in range(25):
            _append(journal, state, node_put(f"n{number % 3}", f"change {number}"))
            num_after += 1
            if journal.snapshot_is_due():
                journal.write_snapshot(state)
                num_after, num_snapshots = 0, num_snapshots + 1
        # What a snapshot holds is no longer kept beside it.
        with closing(sqlite3.connect(tmp_path / "j")) as file:
            assert file.execute("SELECT COUNT(*) FROM facts").fetchone() == (num_after,)
        assert num_snapshots > 2
        assert journal.load() == state


def test_snapshots_cost_a_fixed_share_of_what_is_appended(tmp_path: Path) -> None:
    """However large the fleet: they are as far apart as they are large."""
    with opened(tmp_path / "j", snapshot_least_bytes=1_000) as journal:
        journal.take_over()
        state = journal.load()
        num_snapshots, snapshots_bytes, appended_bytes = 0, 0, 0
        for number in range(1_500):
            change = node_put(f"n{number}")
            _append(journal, state, change)
            appended_bytes += len(json.dumps(encode_change(change)))
            if journal.snapshot_is_due():
                journal.write_snapshot(state)
                num_snapshots += 1
                with closing(sqlite3.connect(tmp_path / "j")) as file:
                    (size,) = file.execute("SELECT length(facts) FROM snapshots").fetchone()
                snapshots_bytes += size
        assert 3 <= num_snapshots <= 8
        assert snapshots_bytes <= 1.6 * appended_bytes
    with opened(tmp_path / "j", snapshot_least_bytes=1_000) as journal:
        # A start knows how large the last one was: it does not begin with another.
        assert journal.load() == state
        assert not journal.snapshot_is_due()


def test_changes_appended_while_a_snapshot_is_written_stay_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with opened(path, snapshot_least_bytes=1_000) as journal:
        journal.take_over()
        state = journal.load()
        for number in range(1_200):
            _append(journal, state, node_put(f"n{number}"))
        assert journal.snapshot_is_due()
        journal.begin_snapshot(state)
        num_parts = 0
        while journal.is_writing_snapshot:
            # A crash here would find the changes as they were.
            with opened(path) as reader:
                assert reader.load() == state
            _append(journal, state, node_put("n7", f"changed in part {num_parts}"))
            assert not journal.snapshot_is_due()
            journal.continue_snapshot()
            num_parts += 1
        assert num_parts == 3
        with closing(sqlite3.connect(path)) as file:
            assert file.execute("SELECT COUNT(*) FROM facts").fetchone() == (num_parts,)
        assert journal.load() == state
        assert state.nodes[NodeId("n7")].reason == "changed in part 2"


def _append(journal: Journal, state: State, change: StateChange) -> None:
    state.apply(change)
    journal.append([change])


def test_a_batch_that_comes_to_nothing_adds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as journal:
        journal.take_over()
        _append(journal, state := State(), node_put("n0"))
        journal.append([])
        assert journal.load() == state


def test_deposed_controller_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with opened(path) as old, opened(path) as new:
        assert old.take_over() == 1
        old.append([node_put("n0")])
        assert new.take_over() == 2
        state = new.load()
        for write in (
            lambda: old.append([node_put("n0", "never")]),
            lambda: old.write_snapshot(state),
            old.probe,
        ):
            with pytest.raises(DeposedError, match="term 2 has begun"):
                write()
        assert new.load() == state


def test_term_is_taken_by_one_of_two_only(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with opened(path) as first, opened(path) as second:
        first.raise_term(0)
        with pytest.raises(DeposedError, match="after 0"):
            second.raise_term(0)
        assert (first.term, second.term) == (1, 0)


def test_kill_in_the_middle_of_writing_leaves_whole_batches(tmp_path: Path) -> None:
    """SIGKILL at some moment of a tight loop of appends, again and again on one file."""
    path = tmp_path / "j"
    known = 0
    for _ in range(2):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.controller.test_journal", str(path)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert writer.stdout is not None
        announced = [int(writer.stdout.readline()) for _ in range(20)]
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        with opened(path) as journal:
            reasons = [node.reason for node in journal.load().nodes.values()]
        assert len(reasons) == BATCH
        assert len(set(reasons)) == 1, "a part of a batch was written"
        assert int(reasons[0]) >= announced[-1] > known, "an announced batch is lost"
        known = int(reasons[0])


def _write_for_ever(path: Path) -> None:
    with opened(path, snapshot_least_bytes=10_000) as journal:
        journal.take_over()
        state = journal.load()
        number = max((int(node.reason) for node in state.nodes.values()), default=0)
        while True:
            number += 1
            changes = [node_put(f"n{index}", str(number)) for index in range(BATCH)]
            for change in changes:
                state.apply(change)
            journal.append(changes)
            if journal.snapshot_is_due():
                journal.write_snapshot(state)
            print(number, flush=True)


def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"not a database at all" * 100)
    with pytest.raises(DatabaseError, match="not a database"):
        Database(tmp_path / "j")


def step_row(step: int, attempt: int, loss: float) -> StepRow:
    return StepRow(
        job=JobId("j"),
        step=step,
        attempt=attempt,
        loss=loss,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=100,
        duration_s=0.5,
        at_s=10.0 * attempt + step,
    )


def test_curve_keeps_the_last_attempt_of_each_step(tmp_path: Path) -> None:
    database = Database(tmp_path / "j")
    curves = Curves(database)
    curves.take([step_row(1, 1, 5.0), step_row(2, 1, 4.0)])
    curves.take([step_row(2, 2, 4.5), step_row(3, 2, 3.5)])
    # What an agent of the old attempt had still buffered comes late.
    curves.take([step_row(3, 1, 9.0)])
    assert [(row.attempt, row.loss) for row in curves.read(JobId("j"))] == [
        (1, 5.0),
        (2, 4.5),
        (2, 3.5),
    ]
    assert curves.last(JobId("j")) == step_row(3, 2, 3.5)
    # 200 tokens from half a second before step 2 ended to the end of step 3.
    assert curves.tokens_per_s(JobId("j")) == pytest.approx(200 / 1.5)
    assert curves.step_s(JobId("j")) == pytest.approx(1.5 / 2)
    assert curves.step_s(JobId("another")) is None
    database.close()


def test_losses_of_held_out_sets_are_kept_with_their_step(tmp_path: Path) -> None:
    database = Database(tmp_path / "j")
    curves = Curves(database)
    first = replace(step_row(1, 1, 5.0), eval_loss=2.0, eval_losses={"a": 1.0, "b": 3.0})
    lost = replace(step_row(2, 1, 4.0), eval_loss=math.nan, eval_losses={"a": math.nan, "b": 1.0})
    again = replace(step_row(2, 2, 4.0), eval_loss=2.5, eval_losses={"a": 2.0, "b": 3.0})
    curves.take([first, step_row(3, 1, 1.0)])
    curves.take([lost])
    assert math.isnan(curves.read(JobId("j"))[1].eval_losses["a"])
    curves.take([again, lost])
    assert curves.read(JobId("j")) == [first, again, step_row(3, 1, 1.0)]
    database.close()
    database = Database(tmp_path / "j")
    curves = Curves(database)
    assert curves.changed_since(JobId("j"), 0, after_step=1)[0] == [step_row(3, 1, 1.0), again]
    assert curves.forget(JobId("j"))
    curves.take([replace(first, eval_losses={})])
    assert curves.read(JobId("j"))[0].eval_losses == {}
    database.close()


def test_curve_survives_a_restart_and_tells_what_is_new(tmp_path: Path) -> None:
    database = Database(tmp_path / "j")
    curves = Curves(database)
    curves.take([step_row(1, 1, 5.0)])
    _, seen = curves.changed_since(JobId("j"), 0)
    database.close()
    database = Database(tmp_path / "j")
    curves = Curves(database)
    assert curves.last(JobId("j")) == step_row(1, 1, 5.0)
    curves.take([step_row(1, 2, 5.0), step_row(2, 2, 4.0)])
    rows, seen = curves.changed_since(JobId("j"), seen)
    assert [row.step for row in rows] == [1, 2]
    assert curves.changed_since(JobId("j"), seen) == ([], seen)
    database.close()
    database = Database(tmp_path / "j")
    # Step 1 was trained on twice.
    assert Curves(database).num_tokens(JobId("j")) == 300
    database.close()


def test_parts_of_steps_are_kept(tmp_path: Path) -> None:
    database = Database(tmp_path / "j")
    curves = Curves(database)
    split = common_pb2.StepSplit(forward_s=0.1, dp_exposed_s=0.25)
    curves.take([step_row(1, 1, 5.0), replace(step_row(2, 1, 4.0), split=split)])
    assert [row.split for row in curves.read(JobId("j"))] == [None, split]
    # Another node reports the same step, and knows no parts of it; then it is done again.
    curves.take([step_row(2, 1, 4.0)])
    assert [row.split for row in curves.read(JobId("j"))] == [None, split]
    curves.take([step_row(2, 2, 4.0)])
    assert [row.split for row in curves.read(JobId("j"))] == [None, None]
    database.close()


def test_curve_of_an_older_version_is_read_and_goes_on(tmp_path: Path) -> None:
    database = Database(tmp_path / "j")
    curves = Curves(database)
    curves.take([step_row(1, 1, 5.0)])
    curves.flush()
    database.close()
    with sqlite3.connect(tmp_path / "j") as connection:
        # As it was before steps had parts.
        connection.execute("ALTER TABLE steps DROP COLUMN split")
    connection.close()
    database = Database(tmp_path / "j")
    curves = Curves(database)
    split = common_pb2.StepSplit(forward_s=0.1)
    curves.take([replace(step_row(2, 1, 4.0), split=split)])
    assert [(row.step, row.split) for row in curves.read(JobId("j"))] == [(1, None), (2, split)]
    database.close()


def test_second_lock_names_the_holder(tmp_path: Path) -> None:
    lock = StateLock(tmp_path)
    lock.say(grpc="127.0.0.1:7070", http="127.0.0.1:7071")
    with pytest.raises(LockedError, match=r"pid \d+, 127\.0\.0\.1:7070"):
        StateLock(tmp_path)
    lock.close()
    StateLock(tmp_path).close()


if __name__ == "__main__":
    _write_for_ever(Path(sys.argv[1]))
