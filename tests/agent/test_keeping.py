"""Workers that leave their attempt live on until a start takes them over, or anything ends them."""

from __future__ import annotations

import pytest

from controller.agent.core.actions import Signal
from controller.agent.core.commands import CommandLimits
from controller.agent.core.inputs import Command, KeptEnded, SessionLost, WorkerEnded
from controller.agent.core.ledger import CommandKind, Result
from controller.agent.core.steps import Step
from controller.agent.core.workers import WorkerKey, taken_over
from tests.agent.machine_node import ABSENCE_S, Node, command

LEAVE_S = CommandLimits().leave_s


def leave(node: Node, *keys: WorkerKey, step: int = 4) -> None:
    for key in keys:
        node.give(WorkerEnded(key=key, completed_step=step, is_kept=True))


def kept(node: Node) -> list[WorkerKey]:
    """Both workers of an attempt that a stop has kept."""
    keys = node.start()
    node.receive(command(CommandKind.STOP, keep=True))
    leave(node, *keys)
    node.end_step("stop-1")
    return keys


def test_a_stop_that_keeps_ends_when_all_have_left_or_ended() -> None:
    node = Node()
    first, second = node.start()
    node.receive(command(CommandKind.STOP, keep=True))
    assert node.signals == [(Signal.LEAVE, (first, second))]
    node.end(first, step=3)
    assert node.steps == {}
    leave(node, second)
    node.end_step("stop-1")
    assert node.answers[0].result == Result(ok=True, completed_step=4)
    assert [signal for signal, _ in node.signals] == [Signal.LEAVE]
    # To the controller it is an end like any other.
    assert node.ended == [first, second]


def test_a_worker_that_does_not_leave_in_time_is_killed() -> None:
    node = Node()
    first, second = node.start()
    node.receive(command(CommandKind.STOP, keep=True))
    leave(node, first)
    node.pass_time(LEAVE_S)
    assert node.signals[1:] == [(Signal.KILL, (second,))]
    node.end(second, step=4)
    node.end_step("stop-1")
    assert node.answers[0].result.ok


def test_a_stop_that_keeps_waits_for_the_step_where_it_is_graceful() -> None:
    node = Node()
    first, second = node.start()
    node.receive(command(CommandKind.STOP, keep=True, graceful=True, timeout_s=5.0))
    assert node.signals == [(Signal.LEAVE_AFTER_STEP, (first, second))]
    node.pass_time(LEAVE_S)
    leave(node, first)
    assert node.steps == {}
    node.pass_time(5.0)
    assert node.signals[1:] == [(Signal.KILL, (second,))]
    node.end(second, step=4)
    node.end_step("stop-1")
    assert node.answers[0].result == Result(ok=True, completed_step=4)


def test_a_start_takes_over_those_of_its_ranks_and_kills_the_others() -> None:
    node = Node()
    first, second = kept(node)
    node.receive(command(CommandKind.START, 2, ranks=(0,)))
    node.end_step("start-2")
    assert node.signals[1:] == [(Signal.KILL, (second,))]
    node.give(KeptEnded(key=second))
    node.run_to("start-2", Step.FORK)
    node.give(KeptEnded(key=first))
    node.end_step("start-2")
    # Nothing is left of the attempt that they left.
    assert node.forgotten == [first, second]


def test_a_stop_that_keeps_nobody_ends_those_that_another_has_kept() -> None:
    node = Node()
    keys = kept(node)
    node.receive(command(CommandKind.STOP, command_id="end-1"))
    assert node.signals[1:] == [(Signal.KILL, tuple(keys))]
    for key in keys:
        node.give(KeptEnded(key=key))
    node.end_step("end-1")
    assert node.answers[-1].result == Result(ok=True, completed_step=4)
    assert node.ended == keys


@pytest.mark.parametrize(
    ("ranks", "starting", "taken"),
    [
        ((2, 3), (2, 3), {2: 2, 3: 3}),
        ((2, 3), (0, 1), {0: 2, 1: 3}),
        ((2,), (2, 3), {2: 2}),
        ((3,), (2, 3), {3: 3}),
        ((1, 2), (2, 3), {2: 2, 3: 1}),
        ((0, 1), (0,), {0: 0}),
    ],
)
def test_a_process_goes_on_as_its_own_rank_or_as_one_that_has_none(
    ranks: tuple[int, ...], starting: tuple[int, ...], taken: dict[int, int]
) -> None:
    kept = [WorkerKey("job", 1, rank) for rank in ranks]
    found = taken_over(
        [WorkerKey("other", 1, 0), *kept], [WorkerKey("job", 2, r) for r in starting]
    )
    assert {new.rank: old.rank for new, old in found.items()} == taken
    assert {old.job_id for old in found.values()} == {"job"}


def test_a_job_that_is_forgotten_has_nobody_left() -> None:
    node = Node()
    keys = kept(node)
    node.receive(command(CommandKind.FORGET))
    node.end_step("forget-1")
    assert node.signals[1:] == [(Signal.KILL, tuple(keys))]


@pytest.mark.parametrize(
    "received",
    [
        Command(command_id="next", kind=CommandKind.SUITE, job_id="", attempt=0),
        Command(command_id="next", kind=CommandKind.START, job_id="other", attempt=1, ranks=(0, 1)),
    ],
    ids=["checks", "another-job"],
)
def test_checks_and_other_jobs_find_nobody_that_was_kept(received: Command) -> None:
    node = Node()
    keys = kept(node)
    node.receive(received)
    if received.kind is CommandKind.START:
        node.end_step("next")
    assert node.steps == {}
    assert node.signals[1:] == [(Signal.KILL, tuple(keys))]
    for key in keys:
        node.give(KeptEnded(key=key))
    assert "next" in node.steps


def test_those_that_are_kept_are_given_up_when_there_is_no_controller() -> None:
    node = Node()
    keys = kept(node)
    node.give(SessionLost())
    node.pass_time(ABSENCE_S)
    assert set(node.signals[-1][1]) == set(keys)
    assert node.signals[-1][0] in (Signal.STOP, Signal.KILL)
