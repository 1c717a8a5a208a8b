"""Over months of virtual time nothing grows: not by ever new nodes, nor by one long incident."""

from __future__ import annotations

import gc
import json
from dataclasses import replace

from controller.core import events as ev
from controller.core.batches import compacted
from controller.core.changes import IncidentPut, fold
from controller.core.codec import decode_change, encode_change
from controller.core.edge.entitled import Reason, refusal
from controller.core.effects import Persist
from controller.core.incident_cut import BEGINNING
from controller.core.incident_record import TimelineEntry
from controller.core.node_events import NodeReleased
from controller.core.retention import Retention, expired
from controller.core.states import TERMINAL, NodeState
from outlast.ids import NodeId
from tests.controller.core.driver import Driver

LIMITS = Retention(former_nodes=40, incident_lines=200)
# A quarantined node that stays away is retired after two hours, and its breaker is closed by then.
RETIRED_S = 8_000.0
NODES_A_JOB = 5


def _expire(driver: Driver, limits: Retention) -> int:
    """As `controller.retention` does, until there is nothing more."""
    num_looks = 0
    while due := expired(driver.machine.state, limits, driver.now_s):
        driver.send(
            ev.RecordsExpired(
                jobs=due.jobs, incidents=due.incidents, cuts=due.cuts, nodes=due.nodes
            )
        )
        num_looks += 1
        assert num_looks < 100, f"{due} is never deleted"
    return num_looks


def _waiting_job() -> Driver:
    """A job that has lost a node for which there is no other; its incident stays open."""
    driver = Driver().running(spares=0)
    driver.lose("n2")
    driver.answer_all("/stop/n1")
    driver.answer_all("/suite/")
    return driver


def _bring_bad_nodes(driver: Driver, number: int) -> None:
    """New nodes come, each under a name that none had before; each fails its checks and goes."""
    for each in range(NODES_A_JOB):
        name = f"pod-{number:03}-{each}"
        driver.join(name)
        (command,) = (id_ for id_ in driver.machine.state.commands if f"{name}/suite" in id_)
        driver.answer(command, verdict="fail", detail="a bad GPU")
        driver.lose(name, gone=False)
        driver.wait(RETIRED_S)
        assert driver.node(name).state is NodeState.RETIRED


def _sizes(driver: Driver) -> dict[str, int]:
    """What might grow, rows of a snapshot and their bytes among it."""
    machine = driver.machine
    state, ctx = machine.state, machine._ctx
    rows = [json.dumps(encode_change(change)) for change in compacted(state.as_changes())]
    tables = {
        "nodes": state.nodes,
        "incidents": state.incidents,
        "commands": state.commands,
        "views": ctx.node_views,
        "quiet": ctx.quiet,
        "silent": ctx.silent,
        "order": state.index.order,
        "blamed": state.index.blamed.members,
        "asked": state.index.of_node,
        "lines": driver.incident().timeline,
        "signs": driver.incident().evidence,
        "findings": driver.incident().findings,
        "held by": driver.job().held_by,
    }
    return {**{what: len(table) for what, table in tables.items()}, "rows": len(rows)}


def _grown(limits: Retention, half: int) -> tuple[dict[str, int], int, int]:
    """What has more at the end than in the middle; objects and bytes of a snapshot besides."""
    driver = _waiting_job()
    sizes: list[dict[str, int]] = []
    objects: list[int] = []
    num_bytes: list[int] = []
    for number in range(2 * half):
        _bring_bad_nodes(driver, number)
        driver._reported.clear()
        _expire(driver, limits)
        if number in (half - 1, 2 * half - 1):
            sizes.append(_sizes(driver))
            changes = compacted(driver.machine.state.as_changes())
            num_bytes.append(sum(len(json.dumps(encode_change(change))) for change in changes))
            gc.collect()
            objects.append(len(gc.get_objects()))
    middle, end = sizes
    grown = {what: end[what] - middle[what] for what in end if end[what] > middle[what]}
    return grown, objects[1] - objects[0], num_bytes[1] - num_bytes[0]


def test_new_nodes_and_lines_of_months_do_not_gather() -> None:
    grown, objects, num_bytes = _grown(LIMITS, 100)
    assert grown == {}
    # Each node that stayed would be several objects.
    assert objects < NODES_A_JOB * 10
    assert num_bytes < 500


def test_without_the_bounds_they_would() -> None:
    """The scenario has what it is for: the test above fails when nothing is deleted."""
    never = Retention(
        former_nodes=10**6, former_nodes_days=1e6, incident_lines=10**6, incident_lines_days=1e6
    )
    grown, objects, num_bytes = _grown(never, 20)
    assert grown["nodes"] == grown["views"] == 20 * NODES_A_JOB
    assert grown["lines"] >= 20 * NODES_A_JOB * 2
    assert grown["signs"] == 20 * NODES_A_JOB
    assert objects > NODES_A_JOB * 10
    assert num_bytes > 20_000


def test_former_nodes_go_by_age_and_number_oldest_first() -> None:
    driver = Driver()
    for name in ("a", "b", "c", "connected"):
        driver.join(name)
        driver.now_s += 86_400.0
    for name in ("a", "b", "c", "connected"):
        driver.send(NodeReleased(node=NodeId(name)))
        if name != "connected":
            driver.lose(name)
        driver.now_s += 86_400.0
    state = driver.machine.state
    assert driver.node("connected").state is NodeState.RELEASED
    now_s = driver.now_s
    assert expired(state, Retention(former_nodes_days=2.5), now_s).nodes == ("a", "b")
    assert expired(state, Retention(former_nodes=3), now_s).nodes == ("a",)
    assert expired(state, Retention(), now_s).nodes == ()
    may_forget = driver.machine.why_not_forgotten
    due = expired(
        state,
        Retention(former_nodes=1, former_nodes_days=0.1),
        now_s,
        may_forget=lambda node: not may_forget(node),
    )
    assert due.nodes == ("a", "b", "c")
    driver.send(ev.RecordsExpired(nodes=(*due.nodes, NodeId("connected"), NodeId("unknown"))))
    assert list(state.nodes) == ["connected"]
    assert fold(state.as_changes()) == state


def test_lines_and_signs_go_by_age_and_number_and_the_beginning_stays() -> None:
    driver = _waiting_job()
    incident = driver.incident()
    lines = tuple(TimelineEntry(phase=f"{number}", at_s=float(number)) for number in range(500))
    signs = tuple(replace(incident.evidence[0], at_s=float(number)) for number in range(500))
    grown = replace(incident, timeline=lines, evidence=signs)
    driver.machine._ctx.put(grown)
    driver.machine._ctx.take_batch()
    # Of signs none is surplus that is younger than a day.
    (cut,) = expired(driver.machine.state, Retention(incident_lines=200), 86_400.0 + 120.0).cuts
    assert (cut.lines, cut.signs) == (300, 21)
    by_age = Retention(incident_lines_days=1.0)
    (cut,) = expired(driver.machine.state, by_age, 86_400.0 + 120.0).cuts
    assert (cut.lines, cut.signs) == (20, 20)
    changes = driver.machine.state.as_changes()
    (persist,) = driver.machine.handle(ev.RecordsExpired(cuts=(cut,)), driver.now_s)
    assert isinstance(persist, Persist)
    left = driver.incident()
    assert left.timeline == lines[:BEGINNING] + lines[BEGINNING + 20 :]
    assert left.evidence == signs[:BEGINNING] + signs[BEGINNING + 20 :]
    # Written with what came before and after in one batch, it is the same.
    longer = replace(left, timeline=(*left.timeline, lines[0]))
    batch = [
        IncidentPut(incident=replace(grown, reason="before"), before=grown),
        *persist.changes,
        IncidentPut(
            incident=replace(longer, reason="before"), before=replace(left, reason="before")
        ),
    ]
    read = [
        decode_change(json.loads(json.dumps(encode_change(change)))) for change in compacted(batch)
    ]
    assert fold([*changes, *read]).incidents == fold([*changes, *batch]).incidents


def test_a_forgotten_node_leaves_nothing_in_jobs_that_go_on() -> None:
    driver = Driver().running()
    driver.lose("n2")
    for part in ("/stop/n1", "/suite/", "/start/"):
        driver.answer_all(part)
    assert "n2" in driver.job().held_by
    driver.wait(RETIRED_S)
    assert driver.node("n2").state is NodeState.RETIRED
    driver.send(ev.RecordsExpired(nodes=(NodeId("n2"),)))
    assert "n2" not in driver.job().held_by
    assert NodeId("n2") not in driver.machine.state.nodes


def test_findings_of_unknown_nodes_go_though_a_known_node_was_checked_before_them() -> None:
    driver = _waiting_job()
    incident = driver.incident()
    strangers = tuple((NodeId(f"pod-{number}"), "fail") for number in range(300))
    driver.machine._ctx.put(replace(incident, findings=((NodeId("n1"), "pass"), *strangers)))
    driver.machine._ctx.take_batch()
    (cut,) = expired(driver.machine.state, Retention(incident_lines=200), driver.now_s).cuts
    driver.send(ev.RecordsExpired(cuts=(cut,)))
    assert driver.incident().findings == ((NodeId("n1"), "pass"), *strangers[100:])


def test_reports_about_an_ended_job_leave_no_table_of_its_nodes() -> None:
    driver = Driver().running()
    state = driver.machine.state
    driver.send(ev.JobCancelRequested(job_id=driver.job().job_id))
    driver.answer_all("/stop/")
    job = driver.job()
    assert job.state in TERMINAL
    assert refusal(state, NodeId("n1"), job.job_id, job.attempt) is None
    assert refusal(state, NodeId("n9"), job.job_id, job.attempt) is Reason.NOT_PLACED
    assert not state.index.node_indexes
