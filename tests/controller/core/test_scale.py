"""What one answer of one node costs when there are thousands of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from controller.core import events as ev
from controller.core import looks, misfit
from controller.core.changes import State, StateChange, fold
from controller.core.codec import decode_change, encode_change
from controller.core.effects import Effect, Persist
from controller.core.naming import MOST_NAMES, names
from controller.core.node_events import (
    NodeDisconnected,
    NodeHeard,
    NodeJoined,
    NodeLate,
    WorkerExited,
    WorkerStatus,
)
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import JobState
from outlast.ids import Attempt, CommandId, JobId, NodeId
from tests.controller.core.driver import JOB, Driver

JOURNALS = Path(__file__).parent / "journals"
NUM_NODES = 300
# A node's own record is most of it.
ANSWER_BYTES = 1_500


class Ledger(Driver):
    """Notes the changes of each event, as a journal would have them."""

    def __init__(self, state: State | None = None) -> None:
        super().__init__(state)
        self.changes: list[StateChange] = []
        self.bytes_by_event: list[tuple[ev.Event, int]] = []
        handle = self.machine.handle

        def noting(event: ev.Event, now_s: float) -> list[Effect]:
            effects = handle(event, now_s)
            changes = [f for e in effects if isinstance(e, Persist) for f in e.changes]
            self.changes += changes
            size = sum(len(json.dumps(encode_change(change))) for change in changes)
            self.bytes_by_event.append((event, size))
            return effects

        self.machine.handle = noting  # type: ignore[method-assign]  # only notes

    def sizes(self, kind: type[ev.Event]) -> list[int]:
        """Bytes journalled for each event of a kind since the last call."""
        found = [size for event, size in self.bytes_by_event if isinstance(event, kind)]
        self.bytes_by_event.clear()
        return found


def test_answers_of_a_large_job_are_journalled_by_themselves() -> None:
    """Checks, ends of ranks and forgetting: not the job's record with each of them."""
    driver = Ledger()
    for number in range(1, NUM_NODES + 1):
        driver.join(f"n{number}")
    driver.submit(nodes=NUM_NODES)
    assert driver.job().reason.endswith(f"and {NUM_NODES - MOST_NAMES} more before use")
    driver.sizes(NodeJoined)
    driver.answer_all("/suite/")
    # The last one starts the attempt, which is as large as the job.
    *checks, _ = driver.sizes(ev.CommandFinished)
    assert max(checks) < ANSWER_BYTES
    driver.answer_all("/start/")
    driver.advanced(1)
    driver.sizes(ev.CommandFinished)
    for rank in range(NUM_NODES):
        driver.send(driver.exited(rank, code=0, detail="done", fault_class=""))
    *exits, _ = driver.sizes(WorkerExited)
    assert max(exits) < ANSWER_BYTES
    assert driver.job().state is JobState.SUCCEEDED
    driver.answer_all("/forget/")
    assert max(driver.sizes(ev.CommandFinished)) < ANSWER_BYTES
    assert driver.job().held_by == ()
    assert fold(driver.changes) == driver.machine.state


def test_nodes_that_join_while_a_job_waits_journal_why_and_not_the_job() -> None:
    driver = Ledger()
    driver.submit(nodes=NUM_NODES)
    for number in range(1, NUM_NODES):
        driver.join(f"n{number}")
    assert max(driver.sizes(NodeJoined)) < ANSWER_BYTES
    assert f"has {NUM_NODES - 1} " in driver.job().reason
    assert fold(driver.changes) == driver.machine.state


def test_job_that_waits_for_thousands_of_nodes_seldom_looks_at_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It did for each node that joined: 12,500 nodes came to 78 million looks at a node."""
    looked_at: list[NodeId] = []
    why_not = misfit.why_not

    def noting(job: JobRecord, node: NodeRecord, now_s: float) -> str:
        looked_at.append(node.node)
        return why_not(job, node, now_s)

    monkeypatch.setattr(misfit, "why_not", noting)
    num_nodes = 3 * looks.FEW_NODES
    driver = Driver()
    driver.submit(nodes=num_nodes)
    for number in range(1, num_nodes - 1):
        if number == looks.FEW_NODES + 1:
            looked_at.clear()
        driver.join(f"n{number}")
    assert len(looked_at) <= 10 * num_nodes
    # What people read of it is a second old at most, also when nothing more happens.
    driver.send(NodeDisconnected(node=NodeId("n7")))
    wake_at_s = driver.machine.wake_at()
    assert wake_at_s == driver.now_s + looks.LOOK_S
    driver.now_s = wake_at_s
    driver.send(ev.TimePassed())
    assert "waiting for 3 more" in driver.job().reason


def test_node_that_joins_a_fleet_without_a_job_has_the_others_not_put_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All free nodes were, for each: 12,000 joined in 2.9 s of the controller's one loop."""
    driver, num_orders = Driver(), 0
    kind = type(driver.machine.state.index.free)
    in_order = kind.__iter__

    def counting(some: Collection[NodeId]) -> Iterator[NodeId]:
        nonlocal num_orders
        num_orders += len(some) > 0
        return in_order(some)  # type: ignore[arg-type]  # only of this kind

    monkeypatch.setattr(kind, "__iter__", counting)
    for number in range(20):
        driver.join(f"n{number}")
    assert num_orders == 0


def test_job_that_waits_takes_the_last_node_in_the_moment_in_which_it_joins() -> None:
    driver = Driver()
    num_nodes = looks.FEW_NODES + 100
    driver.submit(nodes=num_nodes)
    for number in range(1, num_nodes):
        driver.join(f"n{number}")
    # Changes that bring nothing nearer are no obstacle to the one that does.
    for number in range(1, 50):
        driver.send(NodeLate(node=NodeId(f"n{number}"), silent_s=5.0))
        driver.send(NodeHeard(node=NodeId(f"n{number}")))
    assert driver.job().state is JobState.QUEUED
    driver.join(f"n{num_nodes}")
    assert driver.job().state is JobState.PREFLIGHT


def test_ranks_that_are_done_survive_a_snapshot_and_end_with_their_attempt() -> None:
    driver = Driver().running()
    driver.send(driver.exited(1, code=0, detail="done", fault_class=""))
    snapshot = fold(driver.machine.state.as_changes())
    assert snapshot == driver.machine.state
    assert snapshot.done == {JOB: {1: None}}
    driver.send(driver.exited(0))
    driver.answer_all("/stop/")
    assert driver.attempt() == 2
    assert driver.machine.state.done == {}


@pytest.mark.parametrize("name", ["whole_jobs.jsonl", "whole_jobs_snapshot.jsonl"])
def test_a_journal_with_whole_jobs_goes_on(name: str) -> None:
    """Written by the version before answers were changes of their own: a job of whose ranks one
    is done, one of whose two nodes one is checked, one that one of two nodes has forgotten."""
    lines = (JOURNALS / name).read_text().splitlines()
    assert all(json.loads(line)["is"] not in ("RanksDone", "NodeChecked") for line in lines)
    driver = Driver(fold(decode_change(json.loads(line)) for line in lines))
    state = driver.machine.state
    assert state.done == {JOB: {1: None}}
    assert state.jobs[JobId("checked")].unchecked == ("n4",)
    assert state.jobs[JobId("ended")].held_by == ("n2",)
    driver.send(ev.ControllerStarted(term=2))
    done = driver.exited(1, code=0, detail="done", fault_class="")
    for rank, exit_ in enumerate((None, done)):
        status = WorkerStatus(job_id=JOB, attempt=Attempt(1), rank=rank, exit=exit_)
        driver.join(f"n{rank + 1}", (status,))
    for number in range(3, 7):
        driver.join(f"n{number}")
    driver.send(driver.exited(0, code=0, detail="done", fault_class=""))
    assert driver.job().state is JobState.SUCCEEDED
    assert state.done == {}
    driver.answer_all("n4/suite/")
    assert driver.job(JobId("checked")).state is JobState.STARTING
    driver.answer(CommandId("ended/forget/n2"))
    assert driver.job(JobId("ended")).held_by == ()


def test_long_lists_of_names_are_cut() -> None:
    many = [NodeId(f"n{number}") for number in range(12_500)]
    assert names(many[:2]) == "n0, n1"
    assert names(many).endswith("n7 and 12,492 more")
