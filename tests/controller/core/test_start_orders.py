"""What the start orders of an attempt share is journalled once, and found again."""

from __future__ import annotations

import json

from controller.core import events as ev
from controller.core.attempt_record import AttemptRecord
from controller.core.codec import encode_fact
from controller.core.effects import SendCommand
from controller.core.facts import AttemptPut, CommandOpened, fold
from controller.core.node_events import NodeJoined
from controller.core.orders import StartWorkers
from controller.core.states import JobState
from outlast.ids import Attempt, NodeId
from tests.controller.core.driver import JOB, Driver


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
        len(json.dumps(encode_fact(CommandOpened(command=record))))
        for record in driver.machine.state.commands.values()
        if isinstance(record.command, StartWorkers)
    )


def _rejoined(driver: Driver, node: str) -> tuple[AttemptRecord | None, ...]:
    """What is sent to an agent that comes back, of attempts."""
    hello = NodeJoined(
        node=NodeId(node),
        incarnation="one",
        address=f"{node}.example",
        rendezvous_port=4242,
        workers=1,
        statuses=(),
    )
    effects = driver.machine.handle(hello, driver.now_s)
    return tuple(effect.attempt for effect in effects if isinstance(effect, SendCommand))


def test_a_start_order_is_as_long_whatever_the_number_of_nodes() -> None:
    """Else the journal grows with the square of the nodes."""
    assert _order_bytes(_starting(100)) < _order_bytes(_starting(2)) + 10


def test_a_later_controller_repeats_an_order_with_all_that_it_needs() -> None:
    before = _starting(3)
    after = Driver(fold(before.machine.state.as_facts()))
    after.send(ev.ControllerStarted(term=2))
    (attempt,) = _rejoined(after, "n001")
    assert attempt is not None
    assert attempt == before.machine.state.attempts[JOB]
    assert attempt.rank_nodes == ("n000", "n001", "n002")
    assert (attempt.attempt, attempt.world_size) == (Attempt(1), 3)


def test_an_order_of_an_older_journal_is_given_anew() -> None:
    """It had all of it in itself; what is left cannot be carried out, so the job restarts."""
    facts = [
        fact for fact in _starting(2).machine.state.as_facts() if not isinstance(fact, AttemptPut)
    ]
    driver = Driver(fold(facts))
    driver.send(ev.ControllerStarted(term=2))
    assert _rejoined(driver, "n000") == (None,)  # an order to stop, none to start
    assert driver.job().state is JobState.SUSPENDING
    _rejoined(driver, "n001")
    driver.answer_all("/stop/")
    assert driver.job().attempt == 2
    assert driver.machine.state.attempts[JOB].attempt == Attempt(2)
