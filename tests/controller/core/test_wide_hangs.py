"""Hangs of which most nodes of a large job are part."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

from controller.core import events as ev
from controller.core.changes import IncidentPut
from controller.core.codec import encode_change
from controller.core.edge.hangs import HangTable
from controller.core.edge.settings import JobSettings, SettingsTable
from controller.core.hang_signs import MAX_BLAMED
from controller.core.incident_record import Evidence
from controller.core.kinds import Action, EvidenceKind
from controller.core.records import JobRecord
from controller.core.states import JobState, NodeState
from outlast.ids import NodeId
from outlast.layout import Layout
from outlast.v1 import agents_pb2
from tests.controller.core.driver import JOB, Driver

NUM_NODES = 2 * MAX_BLAMED


def _stalled(driver: Driver, num_blamed: int, *, is_program_error: bool = False) -> ev.JobStalled:
    return ev.JobStalled(
        job_id=JOB,
        attempt=driver.attempt(),
        stalled_s=300.0,
        culprit_ranks=tuple(range(num_blamed)),
        detail="all entered and none comes out",
        limit="recovery.hang_timeout_s is 300 s",
        is_program_error=is_program_error,
    )


def _stalls(driver: Driver) -> list[tuple[str | None, int]]:
    evidence = driver.incident(driver.job().num_incidents).evidence
    return [(i.node, i.num_nodes) for i in evidence if i.kind is EvidenceKind.STALLED]


def test_a_hang_of_most_nodes_is_one_sign_and_no_node_is_blamed() -> None:
    driver = Driver().running(spares=0, nodes=NUM_NODES)
    driver.send(_stalled(driver, NUM_NODES))
    assert _stalls(driver) == [(None, NUM_NODES)]
    incident = driver.incident()
    assert f"that is {NUM_NODES} nodes: n1, n10" in incident.evidence[0].detail
    assert len(json.dumps(encode_change(IncidentPut(incident=incident)))) < 4_000
    driver.answer_all("/stop/")
    assert driver.job().attempt == 2
    states = {node.state for node in driver.machine.state.nodes.values()}
    assert states == {NodeState.ASSIGNED}


def test_a_hang_of_most_nodes_that_comes_again_has_all_of_them_checked() -> None:
    """The limit of the spec is not blamed for it: a link or a device may be at fault."""
    driver = Driver().running(spares=0, nodes=NUM_NODES)
    for _ in range(2):
        driver.send(_stalled(driver, NUM_NODES))
        driver.answer_all("/stop/")
        driver.answer_all("/start/")
    assert driver.job().state is JobState.DIAGNOSING
    assert driver.incident(2).action is Action.DIAGNOSE


def test_a_hang_of_most_nodes_is_known_again_after_a_checkpoint() -> None:
    """A checkpoint refills the budget: without this it would be restarted in place for ever."""
    driver = Driver().running(spares=0, nodes=NUM_NODES)
    driver.send(_stalled(driver, NUM_NODES))
    driver.answer_all("/stop/")
    driver.answer_all("/start/")
    driver.advanced(5)
    driver.commit(5)
    assert driver.job().faults_in_row == 0
    driver.send(_stalled(driver, NUM_NODES))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.DIAGNOSING
    assert "the second hang of most nodes in a row" in driver.incident(2).reason


def test_other_stacks_on_some_nodes_blame_none_of_a_hang_of_most() -> None:
    driver = Driver().running(spares=0, nodes=NUM_NODES)
    driver.send(_stalled(driver, NUM_NODES))
    incident = driver.incident()
    stacks = [
        Evidence(
            kind=EvidenceKind.STACKS,
            node=NodeId(f"n{number}"),
            rank=number,
            detail="where it stands",
            at_s=0.0,
            fingerprint="odd" if number == 3 else "usual",
        )
        for number in range(3, 30)
    ]
    evidence = (*incident.evidence, *stacks)
    driver.machine.state.incidents[incident.incident] = replace(incident, evidence=evidence)
    driver.answer_all("/stop/")
    assert driver.incident().culprits == ()


def test_a_hang_of_a_few_nodes_is_a_sign_against_each() -> None:
    driver = Driver().running(spares=0, nodes=NUM_NODES)
    driver.send(_stalled(driver, MAX_BLAMED))
    assert _stalls(driver) == [(node, 1) for node in driver.job().nodes[:MAX_BLAMED]]


def test_a_hang_that_the_program_makes_everywhere_names_the_first_rank() -> None:
    driver = Driver().running(spares=0, nodes=NUM_NODES)
    driver.send(_stalled(driver, NUM_NODES, is_program_error=True))
    assert _stalls(driver) == [("n1", NUM_NODES)]
    driver.answer_all("/stop/")
    assert "rank 0 on n1 failed" in driver.incident().reason


def _summary(rank: int, stalled_s: float) -> agents_pb2.RankSummary:
    summary = agents_pb2.RankSummary(
        job_id=JOB, attempt=1, rank=rank, phase="gradient_sync", stalled_s=stalled_s
    )
    summary.stall_limit_s, summary.stall_limit_source = 1.8, "learned"
    last = summary.last_operation
    last.op, last.group, last.sequence, last.is_inside = "all_reduce", "world", 7, True
    return summary


def _lines_of_a_heartbeat(num_ranks: int, *, is_last_over: bool) -> int:
    """Lines of Python for what the last of all ranks says, when the others stand for too long."""
    driver = Driver().running(spares=0, nodes=num_ranks)
    job: JobRecord = driver.job()
    layout = JobSettings(layout=Layout(dp=num_ranks))
    table = HangTable(SettingsTable(lambda _job: layout))
    for rank in range(num_ranks - 1):
        table.note(_summary(rank, 9.0))
    last = _summary(num_ranks - 1, 9.0 if is_last_over else 0.1)
    num_lines = 0

    def counting(_frame: FrameType, what: str, _argument: object) -> Any:
        nonlocal num_lines
        num_lines += what == "line"
        return counting

    before = sys.gettrace()
    sys.settrace(counting)
    try:
        table.note(last)
        table.heard(job, [last], 100.0)
        found = [judgement.judge() for judgement in table.take_judgements()]
    finally:
        sys.settrace(before)
    assert bool(found) is is_last_over
    return num_lines


def test_while_one_rank_moves_nobody_looks_at_all_the_others() -> None:
    few, many = (_lines_of_a_heartbeat(size, is_last_over=False) for size in (16, 64))
    assert many == few


def test_the_judgement_takes_work_by_ranks_and_not_by_pairs_of_them() -> None:
    few, many = (_lines_of_a_heartbeat(size, is_last_over=True) for size in (32, 128))
    assert many < 5 * few
