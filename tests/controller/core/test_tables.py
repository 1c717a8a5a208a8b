"""Tables and other pure parts: transitions, codec, liveness, progress, policy."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core import incident_record, records
from controller.core.changes import CommandClosed, NodePut, StateChange
from controller.core.codec import decode_change, encode_change
from controller.core.edge.liveness import Limits, LivenessTable
from controller.core.edge.progress import ProgressTable
from controller.core.incident_record import Evidence
from controller.core.kinds import Action, Cause, EvidenceKind, Rung
from controller.core.node_events import NodeHeard, NodeLate, NodeLost, NodeSilent
from controller.core.policy import decide
from controller.core.states import (
    EXCLUDED,
    FREE,
    INCIDENT_TRANSITIONS,
    JOB_TRANSITIONS,
    NODE_TRANSITIONS,
    PLACED,
    TERMINAL,
    IncidentState,
    InvalidTransitionError,
    JobState,
    NodeState,
    check_incident,
    check_job,
    check_node,
)
from controller.core.verdict import PolicyInput
from controller.core.written import RecordChanged, RecordKind
from outlast.failures import FailureClass
from outlast.ids import Attempt, CommandId, NodeId
from tests.controller.core.driver import Driver

N1, N2, N3, N4 = (NodeId(f"n{number}") for number in range(1, 5))


# States


@pytest.mark.parametrize(
    ("table", "start"),
    [
        (JOB_TRANSITIONS, JobState.QUEUED),
        (NODE_TRANSITIONS, NodeState.READY),
        (INCIDENT_TRANSITIONS, IncidentState.OPEN),
    ],
)
def test_every_state_is_in_its_table_and_can_be_reached(
    table: Mapping[StrEnum, tuple[StrEnum, ...]], start: StrEnum
) -> None:
    assert set(table) == set(type(start))
    reached, todo = {start}, [start]
    while todo:
        for state in table[todo.pop()]:
            if state not in reached:
                reached.add(state)
                todo.append(state)
    assert reached == set(type(start))


def test_only_terminal_jobs_cannot_move_and_all_others_can_be_cancelled() -> None:
    for state, targets in JOB_TRANSITIONS.items():
        assert (targets == ()) == (state in TERMINAL)
        passing = state in (JobState.RESTARTING, JobState.STARTING, JobState.RUNNING)
        if state not in TERMINAL and not passing:
            assert JobState.CANCELLED in targets


def test_every_node_state_is_free_placed_or_excluded() -> None:
    assert sorted((*FREE, *PLACED, *EXCLUDED)) == sorted(NodeState)


def test_what_is_not_in_a_table_raises() -> None:
    with pytest.raises(InvalidTransitionError, match="SUCCEEDED -> RUNNING"):
        check_job(JobState.SUCCEEDED, JobState.RUNNING, "job")
    with pytest.raises(InvalidTransitionError, match="RETIRED -> ASSIGNED"):
        check_node(NodeState.RETIRED, NodeState.ASSIGNED, "n1")
    with pytest.raises(InvalidTransitionError, match="CLOSED -> OPEN"):
        check_incident(IncidentState.CLOSED, IncidentState.OPEN, "i1")


# The codec


_RECORDS = {
    RecordKind.JOB: records.JobRecord,
    RecordKind.NODE: records.NodeRecord,
    RecordKind.INCIDENT: incident_record.IncidentRecord,
}


def _changes(kind: RecordKind) -> st.SearchStrategy[RecordChanged]:
    """Any of a record's fields with any values."""
    names = [field.name for field in dataclasses.fields(_RECORDS[kind])]
    chosen = st.lists(st.sampled_from(names), unique=True, max_size=4)
    return st.builds(
        lambda record, which: RecordChanged(
            kind=kind, key="k", values=tuple((name, getattr(record, name)) for name in which)
        ),
        _values(_RECORDS[kind]),
        chosen,
    )


def _values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that an annotation of the records allows."""
    if kind is RecordChanged:
        return st.sampled_from(RecordKind).flatmap(_changes)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return st.one_of([_values(member) for member in get_args(kind)])
    if origin is tuple:
        items = get_args(kind)
        if items[-1] is Ellipsis:
            return st.lists(_values(items[0]), max_size=3).map(tuple)
        return st.tuples(*(_values(item) for item in items))
    kind = getattr(kind, "__supertype__", kind)
    if kind is type(None):
        return st.none()
    if kind is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if kind is str:
        return st.text(max_size=8)
    if kind is int:
        return st.integers(-(2**53), 2**53)
    if kind is bool:
        return st.booleans()
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return st.sampled_from(kind)
    hints = get_type_hints(kind)
    return st.builds(kind, **{f.name: _values(hints[f.name]) for f in dataclasses.fields(kind)})


@pytest.mark.parametrize("kind", get_args(StateChange))
def test_every_change_survives_the_journal(kind: type[StateChange]) -> None:
    @settings(max_examples=60, deadline=None)
    @given(_values(kind))
    def round_trip(change: StateChange) -> None:
        assert decode_change(json.loads(json.dumps(encode_change(change)))) == change

    round_trip()


def test_what_this_version_does_not_know_is_an_error() -> None:
    change = CommandClosed(command_id=CommandId("c"), why="done")
    data = encode_change(change)
    assert isinstance(data, dict)
    with pytest.raises(ValueError, match=r"CommandClosed\.added_later is no field that this vers"):
        decode_change({**data, "added_later": 1})
    with pytest.raises(ValueError, match="unknown kind 'Other'"):
        decode_change({**data, "is": "Other"})
    with pytest.raises(ValueError, match=r"CommandClosed\.why is missing"):
        decode_change({"is": "CommandClosed", "command_id": "c"})
    with pytest.raises(ValueError, match="expected str, found 3"):
        decode_change({**data, "why": 3})


def test_a_change_of_an_unknown_field_is_an_error() -> None:
    change = RecordChanged(kind=RecordKind.NODE, key="n1", values=(("reason", "joined"),))
    data = encode_change(change)
    assert data == {"is": "RecordChanged", "node": "n1", "values": {"reason": "joined"}}
    assert decode_change(data) == change
    with pytest.raises(ValueError, match=r"NodeRecord\.added_later is no field that this version"):
        decode_change({**data, "values": {"reason": "joined", "added_later": 1}})
    with pytest.raises(ValueError, match="expected a change of a record"):
        decode_change({"is": "RecordChanged", "cluster": "n1", "values": {}})


def test_missing_fields_with_defaults_take_them() -> None:
    node = Driver()
    node.join("n1")
    data = encode_change(NodePut(node=node.node("n1")))
    assert isinstance(data, dict)
    assert isinstance(data["node"], dict)
    del data["node"]["stuck"]
    assert decode_change(data) == NodePut(node=node.node("n1"))


# Liveness


def test_each_limit_is_told_once_and_a_beat_takes_it_back() -> None:
    table = LivenessTable()
    table.expect(N1, 0.0, Limits())
    assert table.next_expiry_s() == 6.0
    assert table.expire(5.9) == []
    assert table.expire(6.0) == [NodeLate(node=N1, silent_s=6.0)]
    assert table.expire(10.0) == []
    assert table.expire(15.0) == [NodeLost(node=N1, silent_s=15.0)]
    assert table.expire(60.0) == [NodeSilent(node=N1, silent_s=60.0)]
    assert table.next_expiry_s() is None
    assert table.heard(N1, 61.0) == [NodeHeard(node=N1)]
    assert table.heard(N1, 62.0) == []


def test_a_long_sleep_tells_all_limits_at_once_in_their_order() -> None:
    table = LivenessTable()
    table.expect(N1, 0.0, Limits())
    kinds = [type(event) for event in table.expire(100.0)]
    assert kinds == [NodeLate, NodeLost, NodeSilent]


def test_silence_counts_from_the_moment_at_which_a_limit_became_shorter() -> None:
    """An agent that may send every 2 s is told to send every 0.5 s: it is not late at once."""
    table = LivenessTable()
    table.expect(N1, 0.0, Limits(late_s=6.0, lost_s=15.0))
    table.expect(N1, 1.9, Limits(late_s=1.5, lost_s=3.0))
    assert table.expire(3.3) == []
    assert table.expire(3.5) == [NodeLate(node=N1, silent_s=3.5)]
    assert table.expire(5.0) == [NodeLost(node=N1, silent_s=5.0)]
    table.heard(N1, 6.0)
    table.expect(N1, 7.0, Limits(late_s=6.0, lost_s=15.0))
    assert table.expire(11.9) == []
    assert table.expire(12.0) == [NodeLate(node=N1, silent_s=6.0)]


@given(st.lists(st.floats(0.0, 1.9), min_size=1, max_size=50))
def test_a_node_that_beats_in_time_never_makes_an_event(gaps: list[float]) -> None:
    """No healthy heartbeat reaches the machine."""
    table = LivenessTable()
    table.expect(N1, 0.0, Limits())
    now_s = 0.0
    for gap_s in gaps:
        now_s += gap_s
        assert table.expire(now_s) == []
        assert table.heard(N1, now_s) == []


def test_beats_that_arrive_out_of_order_do_not_turn_time_back() -> None:
    table = LivenessTable()
    table.expect(N1, 0.0, Limits())
    table.heard(N1, 10.0)
    table.heard(N1, 4.0)
    assert table.heard_s(N1) == 10.0
    table.forget(N1)
    assert table.heard(N1, 20.0) == []
    assert table.heard_s(N1) is None


# Progress


def _made(
    table: ProgressTable, job: records.JobRecord, node: NodeId, step: int, *, at_s: float = 0.0
) -> list[int]:
    events = table.made(
        job,
        node,
        attempt=job.attempt,
        completed_step=step,
        resumed_step=0,
        at_s=at_s,
        now_s=at_s,
    )
    return [event.completed_step for event in events]


def test_a_job_has_advanced_when_its_slowest_node_has() -> None:
    job, table = Driver().running().job(), ProgressTable()
    assert _made(table, job, N1, 3) == []
    assert _made(table, job, N2, 1) == [1]
    assert _made(table, job, N2, 2) == []


def test_passing_the_last_fault_is_told_once() -> None:
    job, table = dataclasses.replace(Driver().running().job(), high_step=5), ProgressTable()
    _made(table, job, N1, 9)
    assert _made(table, job, N2, 1) == [1]
    assert _made(table, job, N2, 4) == []
    assert _made(table, job, N2, 5) == [5]
    assert _made(table, job, N2, 6) == []


def test_reports_of_other_attempts_and_nodes_are_dropped() -> None:
    job, table = Driver().running().job(), ProgressTable()
    old = dataclasses.replace(job, attempt=Attempt(0))
    assert (
        table.made(
            job, N1, attempt=old.attempt, completed_step=9, resumed_step=0, at_s=0.0, now_s=0.0
        )
        == []
    )
    assert _made(table, job, NodeId("n9"), 9) == []
    assert _made(table, job, N2, 9) == []
    assert _made(table, job, N1, 1) == [1]


def test_a_stall_is_told_once_per_silence() -> None:
    job, table = Driver().running().job(), ProgressTable()
    _made(table, job, N1, 1)
    _made(table, job, N2, 1, at_s=10.0)
    assert table.stalled(job, 300.0, 300.0) is None
    assert table.stalled(job, 310.0, 300.0) == 300.0
    assert table.stalled(job, 400.0, 300.0) is None
    _made(table, job, N1, 2, at_s=410.0)
    _made(table, job, N2, 2, at_s=410.0)
    assert table.stalled(job, 710.0, 300.0) == 300.0


# Policy


def _evidence(kind: EvidenceKind, node: NodeId | None = N1, **changes: Any) -> Evidence:
    values: dict[str, Any] = {"rank": None, "detail": str(kind), "at_s": 1.0}
    return Evidence(kind=kind, node=node, **{**values, **changes})


def _exit(node: NodeId, at_s: float, fault_class: FailureClass, fingerprint: str = "") -> Evidence:
    return _evidence(
        EvidenceKind.WORKER_EXIT,
        node,
        rank=0,
        at_s=at_s,
        fault_class=fault_class,
        fingerprint=fingerprint,
        traceback="Traceback",
    )


def _input(*evidence: Evidence, **changes: Any) -> PolicyInput:
    values: dict[str, Any] = {
        "findings": (),
        "bad_links": (),
        "figures": (),
        "suspects": (),
        "fault_step": 10,
        "last_fingerprint": "",
        "last_fault_step": -1,
        "same_failures": 0,
        "faults_in_row": 0,
        "ladder": (Rung.RESTART, Rung.DIAGNOSE, Rung.REPLACE),
        "in_place_restarts": 1,
        "retry_left": 3,
        "committed_step": None,
    }
    return PolicyInput(evidence=evidence, **{**values, **changes})


def test_a_lost_connection_is_what_the_others_say() -> None:
    cascade, root = _exit(N1, 1.0, FailureClass.CASCADE), _exit(N2, 2.0, FailureClass.OOM_HOST)
    verdict = decide(_input(cascade, root))
    assert (verdict.action, verdict.cause) == (Action.RESTART_IN_PLACE, Cause.OUT_OF_MEMORY)
    assert verdict.culprits == (N2,)


def test_a_config_error_fails_at_once_and_names_what_to_change() -> None:
    refused = _evidence(
        EvidenceKind.START_FAILED, fault_class=FailureClass.CONFIG, detail="no such file"
    )
    verdict = decide(_input(refused, _evidence(EvidenceKind.NODE_LOST)))
    assert (verdict.action, verdict.cause) == (Action.FAIL, Cause.CONFIG)
    assert "no such file" in verdict.reason


@pytest.mark.parametrize(
    ("kind", "cause", "spends"),
    [
        (EvidenceKind.NODE_LOST, Cause.NODE_LOST, False),
        (EvidenceKind.NOT_STOPPED, Cause.NODE_UNRESPONSIVE, False),
        (EvidenceKind.START_FAILED, Cause.NODE_UNHEALTHY, True),
        (EvidenceKind.DRAIN, Cause.NODE_DRAINED, False),
    ],
)
def test_bad_nodes_are_replaced(kind: EvidenceKind, cause: Cause, spends: bool) -> None:
    verdict = decide(_input(_evidence(kind), retry_left=1 if spends else 0))
    assert (verdict.action, verdict.cause) == (Action.REPLACE_NODES, cause)
    assert verdict.culprits == (N1,)
    assert verdict.spends_retry is spends


def test_a_job_that_starts_nowhere_costs_no_more_nodes_than_its_budget() -> None:
    cannot = _evidence(EvidenceKind.START_FAILED, detail="the standby process never got ready")
    verdict = decide(_input(cannot, retry_left=0))
    assert (verdict.action, verdict.cause) == (Action.FAIL, Cause.NODE_UNHEALTHY)
    assert "never got ready" in verdict.reason
    # A node that is lost at the same time goes all the same.
    both = decide(_input(cannot, _evidence(EvidenceKind.NODE_LOST, N2), retry_left=0))
    assert both.action is Action.REPLACE_NODES


def test_the_same_failure_counts_only_without_progress() -> None:
    again = _exit(N1, 1.0, FailureClass.USER_ERROR, "f")
    repeated = _input(again, last_fingerprint="f", last_fault_step=10)
    assert decide(repeated).action is Action.FAIL
    assert decide(dataclasses.replace(repeated, fault_step=11)).action is not Action.FAIL
    assert decide(dataclasses.replace(repeated, last_fingerprint="g")).action is not Action.FAIL


def test_suspects_are_diagnosed_before_they_are_used_again() -> None:
    fault = _exit(N1, 1.0, FailureClass.NCCL)
    assert decide(_input(fault, suspects=(N1,))).action is Action.DIAGNOSE
    assert decide(_input(fault, suspects=(N2,))).action is Action.RESTART_IN_PLACE
    assert decide(_input(fault, faults_in_row=1)).action is Action.DIAGNOSE
    clean = decide(_input(fault, suspects=(N1,), findings=((N1, "pass"),)))
    assert clean.action is Action.RESTART_IN_PLACE
    assert "checks found nothing" in clean.reason
    failed = decide(_input(fault, suspects=(N1,), findings=((N1, "fail"),)))
    assert (failed.action, failed.culprits) == (Action.REPLACE_NODES, (N1,))


@pytest.mark.parametrize(
    ("ladder", "killed", "killed_and_checked", "lost", "spent"),
    [
        ("diagnose replace", "diagnose", "restart_in_place", "replace_nodes", "fail"),
        ("restart", "restart_in_place", "restart_in_place", "fail", "fail"),
        ("restart replace", "restart_in_place", "restart_in_place", "replace_nodes", "fail"),
        ("replace", "replace_nodes", "replace_nodes", "replace_nodes", "fail"),
        ("restart pause", "restart_in_place", "restart_in_place", "pause", "pause"),
        ("pause", "pause", "pause", "pause", "pause"),
    ],
)
def test_a_job_is_only_given_what_its_ladder_has(
    ladder: str, killed: str, killed_and_checked: str, lost: str, spent: str
) -> None:
    rungs = tuple(Rung(rung) for rung in ladder.split())
    fault = _exit(N1, 1.0, FailureClass.KILLED_BY_SIGNAL)
    gone = _evidence(EvidenceKind.NODE_LOST)
    given = (
        _input(fault, ladder=rungs),
        _input(fault, ladder=rungs, findings=((N1, "pass"),)),
        _input(gone, ladder=rungs),
        _input(fault, ladder=rungs, retry_left=0),
    )
    found = [decide(each).action for each in given]
    assert found == [killed, killed_and_checked, lost, spent]
    assert decide(_input(_evidence(EvidenceKind.DRAIN), ladder=rungs)).action == "replace_nodes"
    again = _exit(N1, 1.0, FailureClass.USER_ERROR, "f")
    repeated = _input(again, ladder=rungs, last_fingerprint="f", last_fault_step=10)
    assert decide(repeated).action is Action.FAIL
    away = dataclasses.replace(
        repeated, evidence=(_exit(N1, 1.0, FailureClass.STORAGE, "f"),), same_failures=1
    )
    # The job may go on as it is when storage is back.
    assert decide(away).action == spent
    assert decide(away).cause is Cause.STORAGE


@pytest.mark.parametrize(
    ("changes", "replaced", "because"),
    [
        # An end of two bad links is the better guess than either other end.
        ({"bad_links": ((N1, N2), (N2, N3))}, (N2,), "an end of 2 bad links"),
        (
            {"bad_links": ((N2, N3),), "figures": ((N2, 0.5), (N3, 0.95))},
            (N2,),
            "n2 has the worse figures",
        ),
        # Too close to call; N1 is where the fault began.
        (
            {"bad_links": ((N1, N3),), "figures": ((N1, 0.9), (N3, 0.95))},
            (N1,),
            "the fault began on n1",
        ),
        ({"bad_links": ((N2, N3),)}, (N3,), "either would do"),
        # The link goes with the node that failed by itself.
        ({"bad_links": ((N2, N3),), "findings": ((N2, "fail"), (N3, "pass"))}, (N2,), "failed"),
        # Two links without a common end cost a node each.
        ({"bad_links": ((N1, N2), (N3, N4))}, (N1, N4), "either would do"),
    ],
)
def test_of_a_bad_link_one_end_is_replaced_and_the_reason_says_which(
    changes: dict[str, Any], replaced: tuple[NodeId, ...], because: str
) -> None:
    verdict = decide(_input(_exit(N1, 1.0, FailureClass.NCCL), suspects=(N1,), **changes))
    assert (verdict.action, verdict.culprits) == (Action.REPLACE_NODES, replaced)
    assert because in verdict.reason


@settings(max_examples=200, deadline=None)
@given(_values(PolicyInput))
def test_every_verdict_explains_itself(found: PolicyInput) -> None:
    # Only what names no node may be about none.
    evidence = tuple(
        dataclasses.replace(item, node=item.node or N1)
        for item in found.evidence
        if item.kind is not EvidenceKind.NO_FIRST_STEP
    )
    verdict = decide(dataclasses.replace(found, evidence=evidence))
    assert verdict.reason
    assert verdict.cause in Cause
    if verdict.action is Action.REPLACE_NODES:
        # A job that does not fit leaves its nodes, and none of them is at fault.
        assert verdict.culprits or verdict.cause is Cause.MISFIT
    if verdict.action is Action.DIAGNOSE:
        assert verdict.culprits
        assert not found.findings
