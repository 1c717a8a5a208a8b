"""The machine of an agent alone: whatever comes in whatever order, it keeps its promises."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from controller.agent.core.actions import (
    ReportEnd,
    Signal,
)
from controller.agent.core.commands import FORGET_PAUSE_S
from controller.agent.core.inputs import (
    Command,
    EventsAcknowledged,
    SessionLost,
    Welcomed,
    WorkerEnded,
    WorkerNotForked,
    WorkersRequested,
)
from controller.agent.core.ledger import CommandKind, CommandLedger, Result
from controller.agent.core.steps import STEPS, StartFacts, Step
from controller.agent.core.workers import WorkerKey
from outlast.failures import ErrorKind
from tests.agent.machine_node import ABSENCE_S, BROKEN, KILL_S, Node, command

# Done by the machine itself, at once.
_OWN = (Step.KILL, Step.DATA_LOADER, Step.FORGET_WORKERS)


@pytest.mark.parametrize(
    ("has_strays", "keeps_copies", "between"),
    [
        (False, False, [Step.FOLDERS, Step.FREE_COPIES]),
        (True, False, [Step.HAND_OVER, Step.FOLDERS, Step.FREE_COPIES]),
        (False, True, [Step.FOLDERS, Step.KEEP_COPIES]),
        (True, True, [Step.HAND_OVER, Step.FOLDERS, Step.KEEP_COPIES]),
    ],
)
def test_start_does_with_host_memory_what_preflight_finds_to_be_done(
    has_strays: bool, keeps_copies: bool, between: list[Step]
) -> None:
    node = Node()
    node.facts = StartFacts(has_strays=has_strays, keeps_copies=keeps_copies)
    node.start()
    assert node.done == [
        Step.CHECK,
        Step.LEFTOVERS,
        Step.PREFLIGHT,
        *between,
        Step.FORK,
        Step.CLEAN_UP,
    ]


def test_start_that_preflight_refuses_touches_no_host_memory() -> None:
    node = Node()
    node.receive(command(CommandKind.START))
    node.run_to("start-1", Step.PREFLIGHT)
    node.end_step("start-1", BROKEN)
    assert node.steps == {}
    assert [each.result for each in node.answers] == [BROKEN]


def test_graceful_stop_asks_then_kills_at_the_deadline() -> None:
    node = Node()
    first, second = node.start()
    node.receive(command(CommandKind.STOP, graceful=True, timeout_s=60.0))
    assert node.signals == [(Signal.STOP, (first, second))]
    assert node.machine.wake_at() == node.now_s + 60.0
    node.end(first, step=7)
    node.pass_time(59.0)
    assert len(node.signals) == 1
    node.pass_time(1.0)
    assert node.signals[1:] == [(Signal.KILL, (second,))]
    assert node.machine.wake_at() == node.now_s + KILL_S
    assert node.answers == []
    node.end(second, step=6)
    node.end_step("stop-1")
    assert [each.result for each in node.answers] == [Result(ok=True, completed_step=7)]
    assert node.machine.wake_at() is None


def test_stop_that_all_workers_follow_kills_nobody() -> None:
    node = Node()
    keys = node.start()
    node.receive(command(CommandKind.STOP, graceful=True, timeout_s=60.0))
    node.end(*keys, step=3)
    node.end_step("stop-1")
    assert [signal for signal, _ in node.signals] == [Signal.STOP]
    assert node.answers[0].result == Result(ok=True, completed_step=3)


def test_workers_that_outlive_sigkill_are_named() -> None:
    node = Node()
    first, _ = node.start()
    node.receive(command(CommandKind.STOP))
    node.end(first)
    node.pass_time(KILL_S)
    node.end_step("stop-1")
    result = node.answers[0].result
    assert result.error_kind is ErrorKind.INTERNAL
    assert result.detail == "job job: still there 10 s after SIGKILL: rank 1 (pid 4001)"


def test_workers_that_end_while_leftovers_are_awaited_do_not_stay() -> None:
    node = Node()
    keys = node.start()
    node.receive(command(CommandKind.STOP))
    node.pass_time(KILL_S)
    node.end(*keys, step=5)
    node.end_step("stop-1")
    assert node.answers[0].result == Result(ok=True, completed_step=5)


def test_start_kills_all_older_attempts_first() -> None:
    node = Node()
    old = node.start(1)
    node.receive(command(CommandKind.START, 2))
    assert node.steps == {"start-2": Step.CHECK}
    node.end_step("start-2")
    assert node.signals == [(Signal.KILL, tuple(old))]
    assert node.steps == {}
    node.end(*old)
    assert node.steps == {"start-2": Step.LEFTOVERS}
    node.run_to("start-2", Step.FORK)
    node.end_step("start-2")
    # Dead workers of the older attempt are dropped once the new one is there.
    assert node.forgotten == old


def test_start_beside_a_worker_that_stays_is_refused() -> None:
    node = Node()
    node.start(1)
    node.receive(command(CommandKind.START, 2))
    node.end_step("start-2")
    node.pass_time(KILL_S)
    node.end_step("start-2")
    assert "still there" in node.answers[0].result.detail
    assert node.steps == {}


@pytest.mark.parametrize("step", [s for s in STEPS[CommandKind.START] if s not in _OWN])
def test_stop_cancels_a_start_at_any_step(step: Step) -> None:
    node = Node()
    node.facts = StartFacts(has_strays=True, keeps_copies=step is not Step.FREE_COPIES)
    node.receive(command(CommandKind.START))
    node.run_to("start-1", step)
    node.receive(command(CommandKind.STOP))
    assert node.cancelled == ["start-1"]
    # It is answered once it has let go of what it was at, however that went.
    node.end_step("start-1", BROKEN)
    (answer,) = node.answers
    assert answer.command.command_id == "start-1"
    assert answer.result.error_kind is ErrorKind.STALE
    node.end_step("stop-1")
    assert node.answers[1].result.ok
    assert node.steps == {}


def test_stop_cancels_a_start_that_waits_for_older_workers() -> None:
    node = Node()
    old = node.start(1)
    node.receive(command(CommandKind.START, 2))
    node.end_step("start-2")
    node.receive(command(CommandKind.STOP, 2))
    assert node.answers[0].result.error_kind is ErrorKind.STALE
    node.end(*old)
    assert node.steps == {"stop-2": Step.LEFTOVERS}


def test_start_whose_ledger_is_not_kept_is_refused_and_a_stop_is_done() -> None:
    node = Node()
    keys = node.start()
    node.disk_is_full = True
    node.receive(command(CommandKind.START, 2))
    assert node.answers.pop().result.detail == "disk full"
    node.receive(command(CommandKind.STOP, 1))
    assert node.signals == [(Signal.KILL, tuple(keys))]


def test_forgetting_is_tried_three_times() -> None:
    node = Node()
    node.receive(command(CommandKind.FORGET))
    for left in (2, 1, 0):
        node.run_to("forget-1", Step.DRAIN)
        node.end_step("forget-1", BROKEN, again=True)
        if left:
            assert node.answers == []
            node.pass_time(FORGET_PAUSE_S)
    assert [each.result for each in node.answers] == [BROKEN]
    # The controller asks again, and what failed is done again.
    node.receive(command(CommandKind.FORGET))
    assert node.steps == {"forget-1": Step.CHECK}


def test_absent_controller_stops_workers_and_starts_under_way() -> None:
    node = Node()
    keys = node.start(1)
    node.receive(command(CommandKind.START, 2))
    node.give(SessionLost())
    node.pass_time(ABSENCE_S - 1.0)
    assert node.cancelled == []
    node.pass_time(1.0)
    assert node.cancelled == ["start-2"]
    assert node.signals == [(Signal.STOP, tuple(keys))]
    assert node.machine.commands.ledger.fence("job").stopped == 2
    node.pass_time(30.0)
    node.pass_time(KILL_S)
    own = next(name for name in node.steps if name != "start-2")
    node.end_step(own)
    assert "still there" in node.own_failures[0]
    # Nobody asked for it, so that nobody gets an answer.
    assert node.answers == []


def test_worker_that_is_never_forked_is_not_waited_for() -> None:
    node = Node()
    node.receive(command(CommandKind.START))
    node.run_to("start-1", Step.FORK)
    key = WorkerKey("job", 1, 0)
    node.give(WorkersRequested(keys=(key,)))
    node.receive(command(CommandKind.STOP))
    assert node.signals == [(Signal.KILL, (key,))]
    node.give(WorkerNotForked(key=key))
    assert node.steps["stop-1"] is Step.LEFTOVERS


def test_end_of_each_worker_is_reported_once_before_the_stop_that_waits_for_it() -> None:
    node = Node()
    first, second = node.start()
    node.receive(command(CommandKind.STOP))
    node.end(first, first, step=3)
    assert (node.ended, node.last_ended) == ([first], [])
    (end,) = node.machine.handle(WorkerEnded(key=second), node.now_s)[:1]
    assert end == ReportEnd(key=second, is_last=True)


def test_end_is_coming_until_the_controller_has_the_event_that_says_so() -> None:
    node = Node()
    first, second = node.start()
    assert not node.machine.is_end_coming(first)
    node.end(first)
    assert node.machine.is_end_coming(first)
    assert not node.machine.is_end_coming(second)
    node.give(EventsAcknowledged(seq=node.machine.line.buffer.last_seq))
    assert not node.machine.is_end_coming(first)


JOBS = ("a", "b")
kinds = st.sampled_from(list(CommandKind))


class Promises(RuleBasedStateMachine):
    """Any commands, repeated in any order; steps, workers, disk and agent fail at any time."""

    @initialize()
    def begin(self) -> None:
        self.node = Node()
        self.sent: list[Command] = []
        # Runs that are owed an answer.
        self.owed: set[str] = set()
        self.first_answers: dict[str, Result] = {}
        self.forked: dict[str, list[int]] = {job: [] for job in JOBS}
        self.stopped = dict.fromkeys(JOBS, 0)
        self.alive: list[WorkerKey] = []
        self.num_seen = 0

    def _receive(self, what: Command) -> None:
        machine = self.node.machine
        before = dict(self.first_answers)
        num_answers = len(self.node.answers)
        is_under_way = what.command_id in self.owed
        fence = machine.commands.ledger.fence(what.job_id)
        self.owed.add(what.command_id)
        self.node.receive(what)
        answered = [a for a in self.node.answers[num_answers:] if a.command == what]
        if is_under_way:
            assert not answered, "a command under way was answered by its repeat"
        known = before.get(what.command_id)
        if known is not None and (known.ok or what.kind is not CommandKind.FORGET):
            assert [a.result for a in answered] == [known], "another answer to a repeated command"
        is_late = what.attempt <= max(fence.started, fence.stopped)
        if what.kind is CommandKind.START and known is None and not is_under_way and is_late:
            assert [a.result.error_kind for a in answered] == [ErrorKind.STALE]
        if what.kind in (CommandKind.STOP, CommandKind.FORGET) and not answered:
            self.stopped[what.job_id] = max(self.stopped[what.job_id], what.attempt)

    @rule(
        kind=kinds,
        job=st.sampled_from(JOBS),
        attempt=st.integers(1, 4),
        graceful=st.booleans(),
        capture_stacks=st.booleans(),
    )
    def receive(
        self, kind: CommandKind, job: str, attempt: int, graceful: bool, capture_stacks: bool
    ) -> None:
        what = Command(
            command_id=f"c{len(self.sent)}",
            kind=kind,
            job_id=job,
            attempt=attempt,
            graceful=graceful,
            timeout_s=5.0,
            capture_stacks=capture_stacks,
        )
        self.sent.append(what)
        self._receive(what)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self._receive(data.draw(st.sampled_from(self.sent)))

    @precondition(lambda self: self.node.steps)
    @rule(data=st.data(), fails=st.booleans(), again=st.booleans())
    def end_step(self, data: st.DataObject, fails: bool, again: bool) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.node.steps)))
        if self.node.steps[command_id] is Step.FORK and command_id not in self.node.cancelled:
            self._fork(command_id)
        self.node.end_step(command_id, BROKEN if fails else None, again=again)

    def _fork(self, command_id: str) -> None:
        what = next(each for each in self.sent if each.command_id == command_id)
        older = [k for k in self.alive if k.job_id == what.job_id and k.attempt < what.attempt]
        assert not older, "an attempt starts beside an older one"
        assert what.attempt > self.stopped[what.job_id], "an attempt starts after its stop"
        assert what.attempt > max(self.forked[what.job_id], default=0), "started twice"
        self.forked[what.job_id].append(what.attempt)
        key = WorkerKey(what.job_id, what.attempt, 0)
        self.node.give(WorkersRequested(keys=(key,)))
        self.alive.append(key)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), was_forked=st.booleans())
    def end_worker(self, data: st.DataObject, was_forked: bool) -> None:
        key = data.draw(st.sampled_from(self.alive))
        self.alive.remove(key)
        self.node.give(
            WorkerEnded(key=key, completed_step=1) if was_forked else WorkerNotForked(key=key)
        )

    @rule(s=st.sampled_from([1.0, 5.0, KILL_S, 60.0]))
    def pass_time(self, s: float) -> None:
        self.node.pass_time(s)
        for job in JOBS:
            # It may have given its workers up.
            stopped = self.node.machine.commands.ledger.fence(job).stopped
            self.stopped[job] = max(self.stopped[job], stopped)

    @rule(is_full=st.booleans())
    def fill_disk(self, is_full: bool) -> None:
        self.node.disk_is_full = is_full

    @rule(is_there=st.booleans())
    def lose_or_find_controller(self, is_there: bool) -> None:
        self.node.give(Welcomed() if is_there else SessionLost())

    @rule()
    def restart_agent(self) -> None:
        """Its workers die with it, and what was under way is not answered by the next."""
        document = json.loads(json.dumps(self.node.machine.commands.ledger.to_json()))
        is_full = self.node.disk_is_full
        self.node = Node(CommandLedger.from_json(document))
        self.node.disk_is_full = is_full
        self.alive.clear()
        self.owed.clear()
        self.num_seen = 0

    @invariant()
    def every_run_is_answered_once_and_with_what_is_remembered(self) -> None:
        if not hasattr(self, "node"):
            return
        for answer in self.node.answers[self.num_seen :]:
            name = answer.command.command_id
            assert name in self.owed, "an answer that nobody is owed"
            self.owed.remove(name)
            self.first_answers[name] = answer.result
        self.num_seen = len(self.node.answers)

    @invariant()
    def no_time_to_wake_at_has_passed(self) -> None:
        if hasattr(self, "node"):
            wake_s = self.node.machine.wake_at()
            assert wake_s is None or wake_s > self.node.now_s

    def teardown(self) -> None:
        """When steps and workers end and time passes, nobody is left without an answer."""
        if not hasattr(self, "node"):
            return
        node = self.node
        node.give(Welcomed())
        for _ in range(200):
            for command_id in sorted(node.steps):
                node.end_step(command_id)
            for key in self.alive:
                node.end(key)
            self.alive.clear()
            node.pass_time(KILL_S)
        self.every_run_is_answered_once_and_with_what_is_remembered()
        assert self.owed == set()
        assert node.machine.wake_at() is None


TestPromises = Promises.TestCase
TestPromises.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
