"""The controller's only loop: events in, the machine, the journal, then the effects.

Events wait in a queue. Each turn takes what is there, lets the machine handle
it, appends the facts of all of it in one commit, and only then runs the other
effects and tells whoever offered the events that they are durable. Deciding and
committing happen without yielding: nobody can see a state that is not durable.

A mistake in here must end the process: a controller that limps on could act on
a state that its journal does not have. `run` therefore lets every error out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from controller.chronicle import Chronicle
from controller.core.effects import Effect, Persist
from controller.core.events import ControllerStarted, Event, TimePassed
from controller.core.facts import Fact, JobPut, State
from controller.core.machine import Machine
from controller.core.states import TERMINAL
from controller.effects import Effects
from controller.store.curves import Curves, StepRow
from controller.store.journal import Journal
from controller.watch import LOOK_S, Watch
from outlast.clock import Clock
from outlast.crashpoints import CrashPoint, reach
from outlast.errors import RetryableError
from outlast.ids import NodeId

# Items in one commit: enough to keep up with thousands of agents that reconnect at
# once, few enough that the first of them does not wait for long.
BATCH_ITEMS = 256
# Step reports wait for each other for so long; their commits then cost one fsync.
CURVES_PERIOD_S = 0.1
# The loop wakes at least this often, so that a pause of the process is noticed.
TICK_S = 1.0
# A turn that begins so late means that we were not listening: nobody is called silent
# before what has arrived meanwhile is read.
PAUSE_S = 0.5
LISTEN_AFTER_PAUSE_S = 1.0
# However often that happens, nodes are judged so long after the first of such pauses: what
# keeps the loop busy must not keep failures from being found.
JUDGE_WITHIN_S = 5.0
# So long events are handled in one turn; then agents and clients are read before the rest.
TURN_S = 0.25
# A timer of the machine that is due again at once would otherwise spin.
SHORTEST_TIMER_S = 0.02


class ServiceStoppedError(RetryableError):
    """The controller is stopping and takes nothing in any more."""


class Changes:
    """Wakes those who look at the state whenever it may have changed."""

    def __init__(self) -> None:
        self.version = 0
        self._next: asyncio.Future[None] | None = None

    def fire(self) -> None:
        self.version += 1
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        self._next = None

    async def wait(self, seen: int) -> int:
        """The present version, once it is newer than `seen`."""
        while self.version == seen:
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
            # Shielded: one watcher that leaves must not end the wait of the others.
            await asyncio.shield(self._next)
        return self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """What one message brought, and who wants to know that it is durable."""

    events: tuple[Event, ...]
    rows: tuple[StepRow, ...]
    durable: Callable[[], None] | None


class Service:
    """Owns the machine; everything that happens to it goes through here."""

    def __init__(
        self,
        *,
        machine: Machine,
        journal: Journal,
        curves: Curves,
        watch: Watch,
        effects: Effects,
        clock: Clock,
    ) -> None:
        self.changes = Changes()
        self.curves = curves
        # Called with nodes for which other limits may hold than before.
        self.on_refreshed: Callable[[Sequence[NodeId]], None] = _nothing
        self._machine = machine
        self._journal = journal
        self._watch = watch
        self._effects = effects
        self._clock = clock
        self._chronicle = Chronicle(machine.state)
        self._queue: deque[_Item] = deque()
        self._awake = asyncio.Event()
        self._stopping = False
        self._not_written: list[Callable[[], None]] = []
        self._flush_at_s: float | None = None
        self._stall_look_s = 0.0
        self._machine_waits_until_s = 0.0
        self._judge_after_s = 0.0
        # Since when judging is put off, None while it is not; and whether we were away for
        # longer than it may be, which is no reason to judge before listening.
        self._put_off_since_s: float | None = None
        self._was_away = False

    @property
    def state(self) -> State:
        """What has been decided, all of it durable. Read only."""
        return self._machine.state

    @property
    def term(self) -> int:
        """The term in which this controller writes."""
        return self._journal.term

    @property
    def now_s(self) -> float:
        """The time of the wall clock, in which all that is decided is noted."""
        return self._clock.now_s()

    @property
    def is_blind(self) -> bool:
        """Whether the controller distrusts its own eyes just now."""
        return self._machine.controller_blind

    def post(self, *events: Event) -> None:
        """Queue events that nobody waits for."""
        if events:
            self.offer(events)

    def offer(
        self,
        events: Sequence[Event],
        rows: Sequence[StepRow] = (),
        durable: Callable[[], None] | None = None,
    ) -> None:
        """Queue what belongs together; `durable` is called when it is in the journal.

        The caller bounds how much of its own may be under way.
        """
        if self._stopping:
            return
        self._queue.append(_Item(events=tuple(events), rows=tuple(rows), durable=durable))
        self._awake.set()

    async def tell(self, *events: Event) -> None:
        """Queue events and wait until they are in the journal.

        Raises:
            ServiceStoppedError: the controller is stopping; they may or may not be.
        """
        if self._stopping:
            raise ServiceStoppedError("the controller is stopping; try again when it is back")
        done = asyncio.Event()
        self.offer(events, durable=done.set)
        await done.wait()

    def stop(self) -> None:
        """Take nothing in any more and end `run` after the present turn.

        From here on nothing that happens is a fault: the controller is leaving.
        """
        self._stopping = True
        self._queue.clear()
        self._awake.set()

    async def run(self) -> None:
        """Handle events until `stop`; any error is the end of the controller."""
        loop = asyncio.get_running_loop()
        self._watch.expect_known(loop.time())
        self.post(ControllerStarted(term=self._journal.term))
        while not self._stopping:
            due_s = self._next_due_s(loop.time())
            if not self._queue:
                timer = loop.call_at(due_s, self._awake.set)
                await self._awake.wait()
                timer.cancel()
            else:
                await asyncio.sleep(0)
            self._awake.clear()
            if self._stopping:
                break
            now_s = loop.time()
            self._turn(now_s, due_s)
            self._note_pause(now_s, loop.time())
        self._write_curves()

    def _turn(self, now_s: float, due_s: float) -> None:
        self._note_pause(due_s, now_s)
        self._look_around(now_s)
        items, facts = self._decide()
        self._journal.continue_snapshot()
        if self._queue or self._journal.is_writing_snapshot:
            self._awake.set()
        for item in items:
            if item.rows:
                self.curves.take(item.rows)
                self._flush_at_s = self._flush_at_s or now_s + CURVES_PERIOD_S
        has_ended = any(isinstance(f, JobPut) and f.job.state in TERMINAL for f in facts)
        is_due = self._flush_at_s is not None and now_s >= self._flush_at_s
        # Whoever sees that a job has ended must see its whole curve.
        if has_ended or is_due:
            self._write_curves()
        for item in items:
            if item.durable is None:
                continue
            if item.rows and self.curves.num_unwritten:
                self._not_written.append(item.durable)
            else:
                item.durable()
        changed = self._watch.refresh(facts, now_s)
        if changed:
            self.on_refreshed(changed)
        if facts or is_due:
            self.changes.fire()

    def _note_pause(self, then_s: float, now_s: float) -> None:
        """Between these two moments we did not listen."""
        pause_s = now_s - then_s
        if pause_s <= PAUSE_S:
            return
        is_away = pause_s > JUDGE_WITHIN_S
        if self._put_off_since_s is None or (is_away and not self._was_away):
            self._put_off_since_s = now_s
            self._was_away = is_away
        latest_s = self._put_off_since_s + JUDGE_WITHIN_S
        self._judge_after_s = min(now_s + LISTEN_AFTER_PAUSE_S, latest_s)

    def _look_around(self, now_s: float) -> None:
        """Queue what follows from nothing but the passing of time."""
        if now_s >= self._judge_after_s:
            self._put_off_since_s = None
            self._was_away = False
            self.post(*self._watch.expire(now_s))
        if now_s >= self._stall_look_s:
            self._stall_look_s = now_s + LOOK_S
            self.post(*self._watch.stalled(now_s, self._clock.now_s()))
        wake_at_s = self._machine.wake_at()
        is_due = wake_at_s is not None and self._clock.now_s() >= wake_at_s
        if is_due and now_s >= self._machine_waits_until_s:
            self._machine_waits_until_s = now_s + SHORTEST_TIMER_S
            self.post(TimePassed())

    def _decide(self) -> tuple[list[_Item], list[Fact]]:
        """Let the machine handle what waits, journal its facts, then run the rest.

        What was handled, and the facts.
        """
        clock_s = asyncio.get_running_loop().time
        until_s = clock_s() + TURN_S
        items: list[_Item] = []
        facts: list[Fact] = []
        effects: list[Effect] = []
        while self._queue and len(items) < BATCH_ITEMS and (not items or clock_s() < until_s):
            item = self._queue.popleft()
            items.append(item)
            for event in item.events:
                for effect in self._machine.handle(event, self._clock.now_s()):
                    if isinstance(effect, Persist):
                        facts.extend(effect.facts)
                    else:
                        effects.append(effect)
        if facts:
            reach(CrashPoint.FACTS_DECIDED)
            self._journal.append(facts)
            reach(CrashPoint.FACTS_KEPT)
            self._chronicle.tell(facts)
        for effect in effects:
            self._effects.run(effect)
        if effects:
            reach(CrashPoint.EFFECTS_RUN)
        if self._journal.snapshot_is_due():
            self._journal.begin_snapshot(self._machine.state)
        return items, facts

    def _write_curves(self) -> None:
        self.curves.flush()
        self._flush_at_s = None
        waiting, self._not_written = self._not_written, []
        for durable in waiting:
            durable()

    def _next_due_s(self, now_s: float) -> float:
        """When the loop must run at the latest, by the monotonic clock."""
        times = [now_s + TICK_S, self._stall_look_s]
        expiry_s = self._watch.next_expiry_s()
        if expiry_s is not None:
            times.append(max(expiry_s, self._judge_after_s))
        if self._flush_at_s is not None:
            times.append(self._flush_at_s)
        wake_at_s = self._machine.wake_at()
        if wake_at_s is not None:
            in_s = wake_at_s - self._clock.now_s()
            times.append(max(now_s + in_s, self._machine_waits_until_s))
        return max(now_s, min(times))


def _nothing(nodes: Sequence[NodeId]) -> None:
    pass
