"""What the start orders of an attempt share is journalled once, and found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.core import events as ev
from controller.core.attempt_record import AttemptRecord, NodeStart
from controller.core.changes import AttemptPut, CommandOpened, fold
from controller.core.codec import decode_change, encode_change
from controller.core.effects import SendCommand
from controller.core.node_events import NodeJoined, WorkerStatus
from controller.core.orders import StartWorkers
from controller.core.states import JobState
from outlast.ids import Attempt, NodeId
from tests.controller.core.driver import JOB, Driver

JOURNALS = Path(__file__).parent / "journals"


def _starting(nodes: int) -> Driver:
    driver = Driver()
    for number in range(nodes):
        driver.join(f"n{number:03d}")
    driver.submit(nodes=nodes)
    driver.answer_all("/suite/")
    assert driver.job().state is JobState.STARTING
    return driver


def _order_bytes(driver: Driver) -> int:
    """The longest start order in the journal."""
    return max(
        len(json.dumps(encode_change(CommandOpened(command=record))))
        for record in driver.machine.state.commands.values()
        if isinstance(record.command, StartWorkers)
    )


def _rejoined(driver: Driver, node: str) -> tuple[AttemptRecord | None, ...]:
    """What is sent to an agent that comes back, of attempts."""
    return tuple(None if start is None else start.attempt for start in _sent_to(driver, node))


def _sent_to(
    driver: Driver, node: str, statuses: tuple[WorkerStatus, ...] = (), *, port: int = 7000
) -> list[NodeStart | None]:
    """The start that an agent that comes back is ordered to make; None for other orders."""
    hello = NodeJoined(
        node=NodeId(node),
        incarnation="one",
        address=f"{node}.example",
        rendezvous_port=4242,
        workers=1,
        statuses=statuses,
        replica_port=port,
        replica_token=f"token of {node}",
    )
    effects = driver.machine.handle(hello, driver.now_s)
    return [effect.start for effect in effects if isinstance(effect, SendCommand)]


def test_a_start_order_is_as_long_whatever_the_number_of_nodes() -> None:
    """Else the journal grows with the square of the nodes."""
    assert _order_bytes(_starting(100)) < _order_bytes(_starting(2)) + 10


def test_a_later_controller_repeats_an_order_with_all_that_it_needs() -> None:
    before = _starting(3)
    after = Driver(fold(before.machine.state.as_changes()))
    after.send(ev.ControllerStarted(term=2))
    (attempt,) = _rejoined(after, "n001")
    assert attempt is not None
    assert attempt == before.machine.state.attempts[JOB]
    assert attempt.rank_nodes == ("n000", "n001", "n002")
    assert (attempt.attempt, attempt.world_size) == (Attempt(1), 3)


@pytest.mark.parametrize("name", ["whole_orders.jsonl", "whole_orders_snapshot.jsonl"])
def test_orders_of_a_journal_that_has_them_whole_are_sent_again(name: str) -> None:
    """The version before wrote ranks and partners into each order, every row of the places of
    copies, and each answer: a start of three nodes, of which one has answered."""
    lines = (JOURNALS / name).read_text().splitlines()
    assert any('"ranks": [1]' in line and '"token": "token 3"' in line for line in lines)
    state = fold(decode_change(json.loads(line)) for line in lines)
    assert state.jobs[JOB].plan.sizes[1].replica_node_indexes == ((1,), (0,))
    driver = Driver(state)
    driver.send(ev.ControllerStarted(term=2))
    _sent_to(driver, "n1", (WorkerStatus(job_id=JOB, attempt=Attempt(1), rank=0, exit=None),))
    sent = [start for node in ("n2", "n3") for start in _sent_to(driver, node)]
    assert [start.ranks for start in sent if start is not None] == [(1,), (2,)]
    assert [start.replica_peers[0].node for start in sent if start is not None] == ["n3", "n1"]
    driver.answer_all("/start/")
    driver.advanced(1)
    assert driver.job().state is JobState.RUNNING


def test_an_order_sent_again_names_where_partners_are_reached_now() -> None:
    """The agent that keeps the copies was restarted: its port and its token are others."""
    lines = (JOURNALS / "whole_orders_snapshot.jsonl").read_text().splitlines()
    driver = Driver(fold(decode_change(json.loads(line)) for line in lines))
    driver.send(ev.ControllerStarted(term=2))
    _sent_to(driver, "n3", port=9000)
    (start,) = _sent_to(driver, "n2")
    assert start is not None
    assert start.replica_peers[0].port == 9000


def test_an_order_of_an_older_journal_is_given_anew() -> None:
    """It had all of it in itself; what is left cannot be carried out, so the job restarts."""
    changes = [
        change
        for change in _starting(2).machine.state.as_changes()
        if not isinstance(change, AttemptPut)
    ]
    driver = Driver(fold(changes))
    driver.send(ev.ControllerStarted(term=2))
    assert _rejoined(driver, "n000") == (None,)  # an order to stop, none to start
    assert driver.job().state is JobState.SUSPENDING
    _rejoined(driver, "n001")
    driver.answer_all("/stop/")
    assert driver.job().attempt == 2
    assert driver.machine.state.attempts[JOB].attempt == Attempt(2)
