"""What a fault and a checkpoint add to the journal: what has changed, whatever the job's size."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from controller.core import events as ev
from controller.core.batches import compacted
from controller.core.changes import (
    AttemptPut,
    CommandOpened,
    IncidentPut,
    JobPut,
    NodePut,
    StateChange,
    fold,
)
from controller.core.codec import decode_change, encode_change
from controller.core.effects import Persist
from controller.core.orders import CommandRecord, StopWorkers
from controller.core.packing import pack_rows, unpack_rows
from controller.core.records import Size
from controller.core.written import RecordChanged
from outlast.ids import Attempt, CommandId, NodeId
from tests.controller.core.driver import JOB, Driver, make_plan

NUM_NODES = 300


def _changes(driver: Driver, *events: ev.Event) -> list[StateChange]:
    batches = [driver.machine.handle(event, driver.now_s) for event in events]
    return [
        change
        for batch in batches
        for each in batch
        if isinstance(each, Persist)
        for change in each.changes
    ]


def _bytes(changes: list[StateChange]) -> int:
    return sum(map(_bytes_of, compacted(changes)))


def _bytes_of(change: StateChange) -> int:
    return len(json.dumps(encode_change(change)))


def _training(num_nodes: int) -> Driver:
    driver = Driver()
    for number in range(1, num_nodes + 1):
        driver.join(f"n{number}")
    driver.submit(nodes=num_nodes)
    driver.answer_all("/suite/")
    driver.answer_all("/start/")
    driver.advanced(1)
    return driver


def test_a_checkpoint_does_not_write_the_job_again() -> None:
    """46,656 checkpoints in 54 days came to 3.7 GB of job records at 2,048 nodes."""
    driver = _training(NUM_NODES)
    changes = _changes(
        driver,
        ev.CheckpointCommitted(job_id=JOB, step=5, attempt=1),
        ev.CheckpointCommitted(job_id=JOB, step=6, attempt=1, stalled_s=7.5),
    )
    assert not any(isinstance(change, JobPut) for change in changes)
    assert _bytes(changes) < 500
    job = driver.job()
    assert (job.committed_step, job.high_step, job.stalled_s) == (6, 6, 7.5)
    before = _training(NUM_NODES).machine.state
    for change in changes:
        before.apply(decode_change(json.loads(json.dumps(encode_change(change)))))
    assert before.jobs[JOB].committed_step == 6
    assert before.jobs[JOB].committed_s == job.committed_s == driver.now_s
    assert before.jobs[JOB].account.seconds == job.account.seconds


def test_signs_of_one_fault_do_not_write_the_incident_again() -> None:
    driver = _training(NUM_NODES)
    driver.send(driver.exited(0))
    more = [driver.exited(rank, fault_class="cascade") for rank in range(1, 60)]
    changes = [change for each in more for change in _changes(driver, each)]
    assert not any(isinstance(change, IncidentPut) for change in changes)
    assert len(driver.incident().evidence) > 50
    assert sum(_bytes([change]) for change in changes) < 60 * 500


def test_an_attempt_names_each_node_once() -> None:
    driver = _training(2)
    (put,) = (f for f in driver.machine.state.as_changes() if isinstance(f, AttemptPut))
    assert (put.attempt.nodes, put.attempt.workers_per_node) == (("n1", "n2"), 1)
    written = json.loads(json.dumps(encode_change(put)))
    assert decode_change(written) == put
    # The version before wrote the node of each rank.
    older = written["attempt"]
    del older["nodes"], older["workers_per_node"]
    older |= {"world_size": 4, "rank_nodes": ["n1", "n1", "n2", "n2"]}
    read = decode_change(written)
    assert isinstance(read, AttemptPut)
    assert read.attempt.nodes == (NodeId("n1"), NodeId("n2"))
    assert (read.attempt.world_size, read.attempt.workers_per_node) == (4, 2)
    assert read.attempt.rank_nodes == ("n1", "n1", "n2", "n2")


def test_the_same_order_to_many_nodes_is_written_once() -> None:
    changes = _changes(driver := _training(NUM_NODES), driver.exited(0))
    written = compacted(changes)
    assert len(written) < 10
    assert _bytes(changes) < 60 * NUM_NODES + 20_000
    state = _training(NUM_NODES).machine.state
    for change in written:
        state.apply(decode_change(json.loads(json.dumps(encode_change(change)))))
    assert list(state.commands) == list(driver.machine.state.commands)
    assert state.jobs[JOB].state == driver.job().state
    assert fold(state.as_changes()) == state


def test_a_whole_attempt_writes_a_few_names_for_each_node() -> None:
    """Orders to stop and to start, all their answers and the attempt: no row per node or rank."""
    written = 0
    sizes = (50, NUM_NODES)
    found = []
    for num_nodes in sizes:
        driver = _training(num_nodes)
        batches = [_changes(driver, driver.exited(0))]
        for kind in ("/stop/", "/start/"):
            state = driver.machine.state
            answers = [driver.finished(each) for each in state.commands if kind in each]
            assert len(answers) == num_nodes
            batches.append(_changes(driver, *answers))
        assert driver.attempt() == 2
        assert sum(len(compacted(batch)) for batch in batches) < 20
        found.append(sum(map(_bytes, batches)))
    written = (found[1] - found[0]) / (sizes[1] - sizes[0])
    # Names of 4 bytes, five times, with quotes and commas.
    assert written < 60


def test_a_job_in_another_state_does_not_write_its_nodes_and_spec_again() -> None:
    driver = _training(NUM_NODES)
    written = compacted(_changes(driver, driver.exited(0)))
    job = [change for change in written if isinstance(change, RecordChanged) and change.key == JOB]
    assert len(job) == 1
    assert not {"nodes", "held_by", "plan", "spec_json"} & dict(job[0].values).keys()
    assert _bytes_of(job[0]) < 1_500


def test_indexes_of_copies_are_written_as_what_they_have_in_common() -> None:
    """At 1,536 nodes an elastic job's plan had 409 kB of them."""
    sizes = tuple(
        Size(
            dp=nodes,
            nodes=nodes,
            spec_json="{}",
            replica_node_indexes=tuple(((index + 7) % nodes,) for index in range(nodes)),
        )
        for nodes in range(1_536, 0, -48)
    )
    plan = make_plan(nodes=1_536, sizes=sizes, replica_node_indexes=sizes[0].replica_node_indexes)
    put = JobPut(job=replace(_training(2).job(), plan=plan))
    assert _bytes_of(put) < 12_000
    assert decode_change(json.loads(json.dumps(encode_change(put)))) == put


@given(st.lists(st.lists(st.integers(0, 12)).map(tuple)).map(tuple))
def test_any_table_of_indexes_is_read_back(rows: tuple[tuple[int, ...], ...]) -> None:
    assert unpack_rows(pack_rows(rows)) == rows


def test_the_time_of_an_older_quarantine_is_found() -> None:
    """It was read from the id of the session; now a field has it."""
    driver = _training(2)
    node = replace(driver.node("n1"), quarantine="n1/1700000000", quarantined_s=1.7e9)
    written = json.loads(json.dumps(encode_change(NodePut(node=node))))
    assert decode_change(written) == NodePut(node=node)
    del written["node"]["quarantined_s"]
    assert decode_change(written) == NodePut(node=node)


def test_an_order_to_stop_of_an_older_journal_is_read() -> None:
    """The field had another name."""
    stop = StopWorkers(graceful=True, timeout_s=5.0, capture_stacks=True)
    record = CommandRecord(
        command_id=CommandId("c1"),
        node=NodeId("n1"),
        job=JOB,
        attempt=Attempt(1),
        issued_s=0.0,
        command=stop,
    )
    written = json.loads(json.dumps(encode_change(CommandOpened(command=record))))
    older = written["command"]["command"]
    older["look_first"] = older.pop("capture_stacks")
    assert decode_change(written) == CommandOpened(command=record)
