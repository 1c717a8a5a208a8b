"""What is written of any batch folds into what was decided, wherever the batch ends."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from controller.core.batches import compacted
from controller.core.changes import (
    AttemptPut,
    CommandClosed,
    CommandOpened,
    IncidentPut,
    JobExplained,
    JobPut,
    NodeForgotten,
    NodePut,
    RanksDone,
    State,
    StateChange,
    fold,
    growth,
)
from controller.core.codec import decode_change, encode_change
from controller.core.incident_record import TimelineEntry
from controller.core.orders import CommandRecord, StartWorkers, StopWorkers
from controller.core.states import IncidentState, JobState, NodeState
from outlast.ids import Attempt, CommandId, NodeId
from tests.controller.core.driver import JOB, Driver

NODES = tuple(NodeId(f"n{number}") for number in range(1, 4))
COMMANDS = (StartWorkers(), StopWorkers(graceful=True, timeout_s=1.0))


@cache
def _begun() -> tuple[StateChange, ...]:
    """A job after its first fault."""
    driver = Driver().running()
    driver.join("n3")
    driver.send(driver.exited(0))
    return tuple(driver.machine.state.as_changes())


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.sampled_from(NODES), st.integers(0, 1)),
        st.tuples(st.just("close"), st.sampled_from(NODES), st.integers(0, 1)),
        st.tuples(st.just("job"), st.sampled_from(list(JobState)), st.integers(1, 2)),
        st.tuples(st.just("explain"), st.sampled_from("abc"), st.just(0)),
        st.tuples(st.just("ranks"), st.sampled_from(NODES), st.integers(0, 1)),
        st.tuples(st.just("node"), st.sampled_from(NODES), st.integers(0, 2)),
        st.tuples(st.just("forget"), st.just(NODES[2]), st.just(0)),
        st.tuples(st.just("line"), st.sampled_from("abc"), st.just(0)),
        st.tuples(st.just("incident"), st.sampled_from(list(IncidentState)), st.just(0)),
        st.tuples(st.just("end of batch"), st.just(""), st.just(0)),
    ),
    max_size=40,
)


def _change(state: State, step: tuple[str, Any, int]) -> StateChange | None:
    """What the machine records for a step: a record with what it was before."""
    what, value, number = step
    job = state.jobs[JOB]
    assert job.incident is not None
    incident = state.incidents[job.incident]
    match what:
        case "open":
            return CommandOpened(command=_command(value, number))
        case "close":
            return CommandClosed(command_id=_command(value, number).command_id, why="done")
        case "job":
            return JobPut(job=replace(job, state=value, attempt=Attempt(number)), before=job)
        case "explain":
            return JobExplained(job_id=JOB, reason=value)
        case "ranks":
            return RanksDone(job_id=JOB, ranks=(number,))
        case "node":
            node = state.nodes.get(value, replace(state.nodes[NODES[0]], node=value))
            changed = replace(node, state=list(NodeState)[number])
            return NodePut(node=changed, before=state.nodes.get(value))
        case "forget":
            # A node is forgotten when nothing is asked of it any more.
            return None if state.index.of_node.get(value) else NodeForgotten(node=value)
        case "line":
            line = TimelineEntry(phase=value, at_s=1.0)
            return growth(incident, replace(incident, timeline=(*incident.timeline, line)))
        case "incident":
            line = TimelineEntry(phase="moved", at_s=2.0)
            changed_incident = replace(
                incident, state=value, timeline=(*incident.timeline, line), reason=str(number)
            )
            return IncidentPut(incident=changed_incident, before=incident)
        case _:
            return None


def _command(node: NodeId, number: int) -> CommandRecord:
    kind = ("start", "stop")[number]
    return CommandRecord(
        command_id=CommandId(f"{JOB}/a1/{kind}/{node}"),
        node=node,
        job=JOB,
        attempt=Attempt(1),
        issued_s=1.0,
        command=COMMANDS[number],
    )


def _tables(state: State) -> list[list[tuple[object, object]]]:
    """Contents in their order, which a replay relies on."""
    tables = (state.jobs, state.nodes, state.incidents, state.attempts, state.commands)
    return [
        *(list(table.items()) for table in tables),
        [(job, list(ranks)) for job, ranks in state.done.items()],
    ]


def _read_back(changes: Iterable[StateChange]) -> list[StateChange]:
    return [decode_change(json.loads(json.dumps(encode_change(change)))) for change in changes]


@given(_STEPS)
def test_batches_fold_into_what_was_decided(steps: list[tuple[str, Any, int]]) -> None:
    begun = _read_back(_begun())
    decided, written = fold(begun), fold(begun)
    batch: list[StateChange] = []
    for step in [*steps, ("end of batch", "", 0)]:
        change = _change(decided, step)
        if change is not None:
            decided.apply(change)
            batch.append(change)
            continue
        for lean in _read_back(compacted(batch)):
            written.apply(lean)
        batch.clear()
        assert _tables(written) == _tables(decided)
        assert (written.index.of_job, written.index.of_node) == (
            decided.index.of_job,
            decided.index.of_node,
        )


def test_a_snapshot_of_open_orders_has_one_row_for_all_nodes() -> None:
    driver = Driver()
    for number in range(100):
        driver.join(f"n{number}")
    driver.submit(nodes=100)
    driver.answer_all("/suite/")
    state = driver.machine.state
    assert sum(isinstance(each.command, StartWorkers) for each in state.commands.values()) == 100
    changes = compacted(state.as_changes())
    # Of the job, its attempt, the orders, and each node.
    assert len(changes) == 103
    assert any(isinstance(change, AttemptPut) for change in changes)
    assert _tables(fold(_read_back(changes))) == _tables(state)
