"""What a fault and a checkpoint add to the journal: what has changed, whatever the job's size."""

from __future__ import annotations

import json
from dataclasses import replace

from controller.core import events as ev
from controller.core.batches import compacted
from controller.core.codec import decode_fact, encode_fact
from controller.core.effects import Persist
from controller.core.facts import AttemptPut, Fact, IncidentPut, JobPut, NodePut, fold
from outlast.ids import NodeId
from tests.controller.core.driver import JOB, Driver

NUM_NODES = 300


def _facts(driver: Driver, *events: ev.Event) -> list[Fact]:
    batches = [driver.machine.handle(event, driver.now_s) for event in events]
    return [
        fact
        for batch in batches
        for each in batch
        if isinstance(each, Persist)
        for fact in each.facts
    ]


def _bytes(facts: list[Fact]) -> int:
    return sum(len(json.dumps(encode_fact(fact))) for fact in compacted(facts))


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
    facts = _facts(
        driver,
        ev.CheckpointCommitted(job_id=JOB, step=5, attempt=1),
        ev.CheckpointCommitted(job_id=JOB, step=6, attempt=1, stalled_s=7.5),
    )
    assert not any(isinstance(fact, JobPut) for fact in facts)
    assert _bytes(facts) < 500
    job = driver.job()
    assert (job.committed_step, job.high_step, job.stalled_s) == (6, 6, 7.5)
    before = _training(NUM_NODES).machine.state
    for fact in facts:
        before.apply(decode_fact(json.loads(json.dumps(encode_fact(fact)))))
    assert before.jobs[JOB].committed_step == 6
    assert before.jobs[JOB].account.seconds == job.account.seconds


def test_signs_of_one_fault_do_not_write_the_incident_again() -> None:
    driver = _training(NUM_NODES)
    driver.send(driver.exited(0))
    more = [driver.exited(rank, fault_class="cascade") for rank in range(1, 60)]
    facts = [fact for each in more for fact in _facts(driver, each)]
    assert not any(isinstance(fact, IncidentPut) for fact in facts)
    assert len(driver.incident().evidence) > 50
    assert sum(_bytes([fact]) for fact in facts) < 60 * 500


def test_an_attempt_names_each_node_once() -> None:
    driver = _training(2)
    (put,) = (f for f in driver.machine.state.as_facts() if isinstance(f, AttemptPut))
    assert (put.attempt.nodes, put.attempt.workers_per_node) == (("n1", "n2"), 1)
    written = json.loads(json.dumps(encode_fact(put)))
    assert decode_fact(written) == put
    # The version before wrote the node of each rank.
    older = written["attempt"]
    del older["nodes"], older["workers_per_node"]
    older |= {"world_size": 4, "rank_nodes": ["n1", "n1", "n2", "n2"]}
    read = decode_fact(written)
    assert isinstance(read, AttemptPut)
    assert read.attempt.nodes == (NodeId("n1"), NodeId("n2"))
    assert (read.attempt.world_size, read.attempt.workers_per_node) == (4, 2)
    assert read.attempt.rank_nodes == ("n1", "n1", "n2", "n2")


def test_the_same_order_to_many_nodes_is_written_once() -> None:
    facts = _facts(driver := _training(NUM_NODES), driver.exited(0))
    written = compacted(facts)
    assert len(written) < 10
    assert _bytes(facts) < 60 * NUM_NODES + 20_000
    state = _training(NUM_NODES).machine.state
    for fact in written:
        state.apply(decode_fact(json.loads(json.dumps(encode_fact(fact)))))
    assert list(state.commands) == list(driver.machine.state.commands)
    assert state.jobs[JOB].state == driver.job().state
    assert fold(state.as_facts()) == state


def test_the_time_of_an_older_quarantine_is_found() -> None:
    """It was read from the id of the session; now a field has it."""
    driver = _training(2)
    node = replace(driver.node("n1"), quarantine="n1/1700000000", quarantined_s=1.7e9)
    written = json.loads(json.dumps(encode_fact(NodePut(node=node))))
    assert decode_fact(written) == NodePut(node=node)
    del written["node"]["quarantined_s"]
    assert decode_fact(written) == NodePut(node=node)
