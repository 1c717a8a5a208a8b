"""What comes in from agents, in the machine's words."""

from __future__ import annotations

import json

import pytest

from controller import convert
from controller.command_messages import command_message
from controller.core.edge import reports
from controller.core.kinds import NonFiniteAgain
from controller.core.orders import StartWorkers
from controller.core.starts import start_on
from controller.core.states import JobState
from diagnostics.core.rules.exits import EXITS
from outlast.failures import ErrorKind
from outlast.ids import Attempt, JobId, NodeId
from outlast.spec.parse import parse_spec
from outlast.v1 import agents_pb2
from tests.controller.core.driver import Driver
from tests.diagnostics.spoken import message_from


def test_a_suite_answered_from_memory_is_no_verdict_and_asked_for_again() -> None:
    """What it found was lost with the agent that ran it, and may have been a failure."""
    driver = Driver()
    driver.join("n1")
    driver.join("n2")
    driver.submit()
    assert driver.job().state is JobState.PREFLIGHT
    repeated = agents_pb2.CommandResult(command_id="n1/suite/1", ok=True)
    lines = driver.send(reports.command_finished(NodeId("n1"), repeated))
    assert "open n1/suite/2" in lines
    assert "n1" in driver.job().unchecked
    repeated.command_id = "n1/suite/2"
    repeated.findings.add(test="device", verdict="pass")
    driver.send(reports.command_finished(NodeId("n1"), repeated))
    assert driver.job().unchecked == ("n2",)


def test_plan_says_which_nodes_have_the_state_of_a_node_too() -> None:
    document = {
        "name": "copied",
        "parallel": {"pp": 3, "tp": 2},
        "model": {"layers": 3},
        "resources": {"workers_per_node": 2},
    }
    assert convert.plan_of(parse_spec(document)).replica_node_indexes == ()
    copied = {**document, "checkpoint": {"replicas": 1}}
    assert convert.plan_of(parse_spec(copied)).replica_node_indexes == ((1,), (2,), (0,))


def test_plan_of_an_elastic_job_has_each_size_that_works_with_a_spec_of_its_own() -> None:
    document = {
        "name": "elastic",
        "parallel": {"dp": 6, "tp": 2, "zero": {"level": 1, "communication": "bf16"}},
        "data": {"global_batch": 12},
        "resources": {"workers_per_node": 2, "nodes": 6},
        "checkpoint": {"replicas": 1},
    }
    plain = convert.plan_of(parse_spec(document))
    assert (plain.sizes, plain.wanted_nodes) == ((), 6)
    wanted = {"min_dp": 1, "after_s": 5, "grow_after_s": 7}
    spec = parse_spec({**document, "recovery": {"elastic": wanted}})
    plan = convert.plan_of(spec)
    assert (plan.shrink_after_s, plan.grow_after_s, plan.wanted_nodes) == (5, 7, 6)
    assert [size.dp for size in plan.sizes] == [6, 4, 3, 2, 1]
    assert [size.nodes for size in plan.sizes] == [6, 4, 3, 2, 1]
    assert plan.sizes[0].spec_json == spec.canonical_json()
    assert plan.sizes[0].replica_node_indexes == plan.replica_node_indexes
    assert plan.sizes[3].replica_node_indexes == ((1,), (0,))
    assert plan.sizes[4].replica_node_indexes == ()
    for size in plan.sizes[1:]:
        # An agent reads it as it reads any other.
        smaller = parse_spec(json.loads(size.spec_json))
        assert (smaller.parallel.dp, smaller.num_nodes) == (size.dp, size.nodes)
        assert smaller.canonical_json() == size.spec_json
        assert smaller.recovery.elastic.min_dp is None
        assert smaller.data == spec.data


def test_sizes_of_an_elastic_job_keep_its_nodes_whole() -> None:
    document = {
        "name": "elastic",
        "parallel": {"dp": 8},
        "data": {"global_batch": 24},
        "resources": {"workers_per_node": 4},
        "recovery": {"elastic": {"min_dp": 1}},
    }
    plan = convert.plan_of(parse_spec(document))
    assert [(size.dp, size.nodes) for size in plan.sizes] == [(8, 2), (4, 1)]


def test_plan_knows_which_nodes_have_a_part_in_a_rank_s_loss() -> None:
    document = {
        "name": "spread",
        "parallel": {"pp": 2, "dp": 2},
        "model": {"layers": 2},
        "resources": {"workers_per_node": 1},
        "detectors": {"non_finite_again": "rollback", "rollback_steps": 7},
    }
    plan = convert.plan_of(parse_spec(document))
    assert (plan.non_finite_again, plan.rollback_steps) == (NonFiniteAgain.ROLLBACK, 7)
    assert [plan.model_node_indexes(rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    document |= {"parallel": {"tp": 2, "dp": 2}, "resources": {"workers_per_node": 2}}
    plan = convert.plan_of(parse_spec(document))
    assert [plan.model_node_indexes(rank) for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    document |= {
        "parallel": {"dp": 4, "ep": 2},
        "model": {"moe": {"num_experts": 2}, "mlp_bias": False},
        "resources": {"workers_per_node": 1},
    }
    plan = convert.plan_of(parse_spec(document))
    assert [plan.model_node_indexes(rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    document |= {"parallel": {"dp": 2, "cp": 2}, "model": {}}
    plan = convert.plan_of(parse_spec(document))
    assert [plan.model_node_indexes(rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_each_agent_is_told_where_its_copies_go_and_a_replaced_one_where_they_are() -> None:
    driver = Driver()
    for number in (1, 2):
        driver.send(
            reports.node_joined(
                agents_pb2.Hello(
                    node_id=f"n{number}",
                    incarnation="one",
                    address=f"10.0.0.{number}",
                    workers=1,
                    replica_port=7000 + number,
                    replica_token=f"token {number}",
                )
            )
        )
    driver.submit(replica_node_indexes=((1,), (0,)))
    for node in ("n1", "n2"):
        result = agents_pb2.CommandResult(command_id=f"{node}/suite/1", ok=True)
        result.findings.add(test="device", verdict="pass")
        driver.send(reports.command_finished(NodeId(node), result))
    state = driver.machine.state
    starts = [
        record for record in state.commands.values() if isinstance(record.command, StartWorkers)
    ]
    assert [record.attempt for record in starts] == [Attempt(1), Attempt(1)]
    attempt = state.attempts[JobId("job")]
    (first, second) = (
        command_message(record, start_on(state, attempt, record.node)).start_workers
        for record in starts
    )
    (peer,) = first.replica_peers
    assert (peer.node_id, peer.address, peer.port) == ("n2", "10.0.0.2", 7002)
    assert second.replica_peers[0].token == "token 1"


def test_the_end_of_a_worker_says_by_which_rule_it_has_its_class() -> None:
    exit_ = agents_pb2.WorkerExit(
        code=1,
        exception_type="builtins.OSError",
        exception_message="[Errno 28] No space left on device: '/ckpt'",
        last_operation=message_from("in dp all_reduce #3"),
    )
    told = reports.worker_exited(NodeId("n1"), "job", 2, 1, exit_)
    assert told.fault_class == "storage"
    assert told.detail == (
        "OSError: [Errno 28] No space left on device: '/ckpt' (exception, class 'storage', "
        f"rule 'storage' of table {EXITS.version}) (in dp all_reduce #3)"
    )


@pytest.mark.parametrize(("kind", "read"), [("storage", "storage"), ("melted", "internal")])
def test_a_kind_of_error_of_another_version_is_read_as_internal(kind: str, read: str) -> None:
    result = agents_pb2.CommandResult(command_id="c", error_kind=kind, detail="it cannot")
    assert reports.command_finished(NodeId("n1"), result).error_kind is ErrorKind(read)
