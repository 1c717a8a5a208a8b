"""The controller's only loop: events in, the machine, the journal, then the effects.

Events wait in a queue. Each turn takes what is there, lets the machine handle
it, appends the facts of all of it in one commit, and only then runs the other
effects and tells whoever offered the events that they are durable. Deciding and
committing happen without yielding: nobody can see a state that is not durable.

A controller that limps on could act on a state that its journal does not have. So when the
machine fails on an event, the event is marked in the journal and skipped, or the job whose
state is the cause is set aside, and the machine is built anew from the journal (`poison`).
Mistakes of what only observes cost that look (`guard`). Every other error ends the process:
`run` lets it out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from controller.changes import Changes
from controller.chronicle import Chronicle
from controller.core.edge.edge import Edge
from controller.core.effects import Effect, Persist
from controller.core.events import ControllerStarted, Event, TimePassed
from controller.core.facts import Fact, JobPut, State
from controller.core.machine import OF_PERSONS, Machine
from controller.core.states import TERMINAL
from controller.effects import Effects
from controller.guard import Guard
from controller.items import Item
from controller.poison import Poison, failed_request, job_at_fault, set_aside
from controller.read_only import ReadOnly
from controller.refusals import ServiceStoppedError
from controller.store.curves import Curves, StepRow
from controller.store.database import DiskFullError
from controller.store.journal import Journal
from controller.store.reserve import Reserve
from outlast.clock import Clock
from outlast.crashpoints import CrashPoint, reach
from outlast.errors import OutlastError
from outlast.ids import NodeId

logger = logging.getLogger(__name__)

# Items in one commit: enough to keep up with thousands of agents that reconnect at
# once, few enough that the first of them does not wait for long.
BATCH_ITEMS = 256
# Step reports wait for each other for so long; their commits then cost one fsync.
CURVES_PERIOD_S = 0.1
# The loop wakes at least this often, so that a pause of the process is noticed.
TICK_S = 1.0
# So long events are handled in one turn; then agents and clients are read before the rest.
TURN_S = 0.25
# A timer of the machine that is due again at once would otherwise spin.
SHORTEST_TIMER_S = 0.02


class Service:
    """Owns the machine; everything that happens to it goes through here."""

    def __init__(
        self,
        *,
        machine: Machine,
        journal: Journal,
        curves: Curves,
        edge: Edge,
        effects: Effects,
        clock: Clock,
        reserve: Reserve | None = None,
    ) -> None:
        self.changes = Changes()
        self.curves = curves
        # Called with nodes for which other limits may hold than before.
        self.on_refreshed: Callable[[Sequence[NodeId]], None] = _nothing
        # Called when the machine has forgotten what it saw: agents have to join again.
        self.on_restored: Callable[[], None] = _nothing
        self.guard = Guard()
        self.poison = Poison(journal)
        # The controller ends in order, and takes nodes of its own along.
        self.is_leaving = False
        self._machine = machine
        self._journal = journal
        self._edge = edge
        self._effects = effects
        self._clock = clock
        self._chronicle = Chronicle(machine.state)
        self._queue: deque[Item] = deque()
        self._awake = asyncio.Event()
        self._stopping = False
        self._not_written: list[Callable[[], None]] = []
        self._flush_at_s: float | None = None
        self._machine_waits_until_s = 0.0
        self._read_only = ReadOnly(journal, reserve, self.changes.fire)
        # Items to be handled in turns of their own: one of them cannot be journalled.
        self._num_alone = 0

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

    def why_not_forgotten(self, node: NodeId) -> str:
        """Why a node has to stay on the list; "" when it need not."""
        return self._machine.why_not_forgotten(node)

    @property
    def brings_nodes(self) -> bool:
        """Whether the cluster brings nodes by itself."""
        return self._machine.settings.brings_nodes

    @property
    def num_aside(self) -> int:
        """How many jobs are set aside, because the machine fails on their states."""
        return len(self._machine.aside)

    @property
    def is_blind(self) -> bool:
        """Whether the controller distrusts its own eyes just now."""
        return self._machine.controller_blind

    @property
    def read_only(self) -> str:
        """Why nothing is decided at present: the journal's disk is full. "" when it is."""
        return self._read_only.why

    @property
    def free_bytes(self) -> int | None:
        """Room on the journal's disk; None when nobody said which one that is."""
        return self._read_only.free_bytes

    def begin_read_only(self, why: str) -> None:
        """Decide nothing until there is room on the journal's disk."""
        self._read_only.begin(why)
        self._refuse_requests(self._read_only.refusal())

    def post(self, *events: Event) -> None:
        """Queue events that nobody waits for."""
        if events:
            self.offer(events)

    def offer(
        self,
        events: Sequence[Event],
        rows: Sequence[StepRow] = (),
        durable: Callable[[], None] | None = None,
        *,
        source: str = "",
        failed: Callable[[OutlastError], None] | None = None,
    ) -> None:
        """Queue what belongs together; `durable` is called when it is in the journal.

        `failed` is called before when it was skipped, and instead when it is not even tried:
        a request that somebody waits for is refused, not carried out an hour later. The caller
        bounds how much of its own may be under way.
        """
        if self._stopping:
            return
        self._queue.append(
            Item(
                events=tuple(events),
                rows=tuple(rows),
                durable=durable,
                source=source,
                failed=failed,
            )
        )
        self._awake.set()

    async def tell(self, *events: Event) -> None:
        """Queue events and wait until they are in the journal.

        Raises:
            ServiceStoppedError: the controller is stopping; they may or may not be.
            ReadOnlyError: the journal's disk is full; they are not.
            PoisonedError: the controller failed on them, or on their like again and again;
                nothing has happened.
        """
        if self._stopping:
            raise _stopped()
        if events:
            self._read_only.check()
        for event in events:
            self.poison.check_request(event)
        done = asyncio.Event()
        errors: list[OutlastError] = []

        def failed(error: OutlastError) -> None:
            errors.append(error)
            done.set()

        self.offer(events, durable=done.set, failed=failed)
        await done.wait()
        for error in errors:
            raise error

    def stop(self) -> None:
        """Take nothing in any more and end `run` after the present turn.

        From here on nothing that happens is a fault: the controller is leaving.
        """
        self._stopping = True
        self._refuse_requests(_stopped())
        self._queue.clear()
        self._awake.set()

    async def run(self) -> None:
        """Handle events until `stop`; any error is the end of the controller."""
        loop = asyncio.get_running_loop()
        self._edge.expect_known(loop.time())
        self.post(ControllerStarted(term=self._journal.term))
        while not self._stopping:
            due_s = self._next_due_s(loop.time())
            if not self._queue or self.read_only:
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
            self._edge.listening.note_pause(now_s, loop.time())
        self._write_curves()

    def _turn(self, now_s: float, due_s: float) -> None:
        self._edge.listening.note_pause(due_s, now_s)
        if self.read_only and not self._may_write_again(now_s):
            return
        self._look_around(now_s)
        items, facts = self._decide()
        self._continue_snapshot()
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
        self.guard.call("watch", None, lambda: self._refresh(facts, now_s))
        if facts or is_due:
            self.changes.fire()

    def _may_write_again(self, now_s: float) -> bool:
        """Whether read-only mode has ended."""
        if not self._read_only.has_ended(now_s):
            return False
        self._edge.listening.begin_anew(now_s)
        self._awake.set()
        return True

    def _continue_snapshot(self) -> None:
        try:
            if self._journal.snapshot_is_due():
                self._journal.begin_snapshot(self._machine.state)
            self._journal.continue_snapshot()
        except DiskFullError as error:
            # The facts that it would have replaced are all there, and smaller than it.
            logger.warning("no room for a snapshot of the journal, tried again later: %s", error)
            self._journal.drop_snapshot()

    def _refresh(self, facts: Sequence[Fact], now_s: float) -> None:
        changed = self._edge.refresh(facts, now_s)
        if changed:
            self.on_refreshed(changed)

    def _look_around(self, now_s: float) -> None:
        """Queue what follows from nothing but the passing of time."""
        wall_s = self._clock.now_s()
        events: list[Event] = []
        self.guard.call("watch", None, lambda: events.extend(self._edge.wake(now_s, wall_s)))
        self.post(*events)
        wake_at_s = self._machine.wake_at()
        is_due = wake_at_s is not None and self._clock.now_s() >= wake_at_s
        if is_due and now_s >= self._machine_waits_until_s:
            self._machine_waits_until_s = now_s + SHORTEST_TIMER_S
            self.post(TimePassed())

    def _decide(self) -> tuple[list[Item], list[Fact]]:
        """Let the machine handle what waits, journal its facts, then run the rest.

        What was handled, and the facts.
        """
        clock_s = asyncio.get_running_loop().time
        until_s = clock_s() + TURN_S
        items: list[Item] = []
        facts: list[Fact] = []
        effects: list[Effect] = []
        most = 1 if self._num_alone else BATCH_ITEMS
        self._num_alone = max(0, self._num_alone - 1)
        while self._queue and len(items) < most and (not items or clock_s() < until_s):
            item = self._queue.popleft()
            items.append(item)
            if not self._handle(items, facts, effects):
                # It has been skipped; what the machine has seen is to be said again first.
                return items, facts
        if facts and not self._append(items, facts):
            return [], []
        for effect in effects:
            self.guard.call("effects", None, partial(self._effects.run, effect))
        if effects:
            reach(CrashPoint.EFFECTS_RUN)
        return items, facts

    def _handle(self, items: list[Item], facts: list[Fact], effects: list[Effect]) -> bool:
        """Let the machine handle the last item; False when it failed, and the item was skipped."""
        item = items[-1]
        for event in item.events:
            if self.poison.ignores(event):
                continue
            try:
                batch = self._machine.handle(event, self._clock.now_s())
            except Exception as error:
                if isinstance(event, ControllerStarted) and self._machine.job_at_work is None:
                    raise  # Not the event is at fault, but the state.
                # Those before it are whole. Their effects are done when the machine looks anew,
                # as after a crash between the two.
                effects.clear()
                if facts and not self._append(items, facts):
                    items.clear()
                    facts.clear()
                    return False
                self._skip_cause(item, event, error)
                return False
            for effect in batch:
                if isinstance(effect, Persist):
                    facts.extend(effect.facts)
                else:
                    effects.append(effect)
        return True

    def _append(self, items: Sequence[Item], facts: Sequence[Fact]) -> bool:
        """Journal facts; False when they cannot be written down, and are gone.

        Then the items are tried again one by one, and the one alone is skipped.
        """
        reach(CrashPoint.FACTS_DECIDED)
        try:
            self._append_or_use_reserve(facts)
        except DiskFullError as error:
            # None of it has happened. It is tried again when there is room.
            self._queue.extendleft(reversed(items))
            self.begin_read_only(str(error))
            self._restore()
            return False
        except OutlastError:
            raise
        except Exception as error:
            if not items or not items[0].events:
                raise
            if len(items) == 1:
                self._skip(items[0], items[0].events[-1], error)
                if items[0].durable is not None:
                    items[0].durable()
            else:
                self._num_alone = len(items) + 1
                self._queue.extendleft(reversed(items))
                self._restore()
            return False
        reach(CrashPoint.FACTS_KEPT)
        self.guard.call("log", None, lambda: self._chronicle.tell(facts))
        return True

    def _append_or_use_reserve(self, facts: Sequence[Fact]) -> None:
        try:
            self._journal.append(facts)
        except DiskFullError as error:
            if not self._read_only.give_up_reserve():
                raise
            self._journal.append(facts)
            self.begin_read_only(str(error))

    def _refuse_requests(self, error: OutlastError) -> None:
        """Nothing comes of the requests that wait; what agents report goes on waiting."""
        requests = [item for item in self._queue if item.is_request]
        self._queue = deque(item for item in self._queue if not item.is_request)
        for request in requests:
            request.refuse(error)

    def _skip_cause(self, item: Item, event: Event, error: Exception) -> None:
        """Continue without what made the machine fail: this event, or a job's state."""
        job_id = job_at_fault(self._machine, self._journal.load(), event)
        if job_id is None:
            self._skip(item, event, error)
            self.poison.ignore_if_too_often(self._machine, event, error)
            return
        set_aside(self._machine, job_id, error)
        if isinstance(event, OF_PERSONS) and event.job_id == job_id:
            # It was one more try, and would be one again.
            self.poison.count_request(event)
            item.refuse(failed_request(error))
        elif not isinstance(event, ControllerStarted):
            # The item's events before this one are in the journal.
            rest = item.events[item.events.index(event) :]
            self._queue.appendleft(replace(item, events=rest))
        self._restore()

    def _skip(self, item: Item, event: Event, error: Exception) -> None:
        """Mark an event as poisonous, and continue from the journal without it."""
        self.poison.mark(event, item.source, error, is_request=item.is_request)
        item.refuse(failed_request(error))
        self._restore()

    def _restore(self) -> None:
        """Build the machine anew from the journal, as a controller that has just started."""
        self._machine.restore(self._journal.load())
        self._chronicle = Chronicle(self._machine.state)
        self._edge.expect_known(asyncio.get_running_loop().time())
        self.on_restored()
        self._queue.appendleft(Item(events=(ControllerStarted(term=self._journal.term),)))
        self.changes.fire()

    def _write_curves(self) -> None:
        try:
            self.curves.flush()
        except DiskFullError as error:
            self.begin_read_only(str(error))
            return
        self._flush_at_s = None
        waiting, self._not_written = self._not_written, []
        for durable in waiting:
            durable()

    def _next_due_s(self, now_s: float) -> float:
        """When the loop must run at the latest, by the monotonic clock."""
        if self.read_only:
            return self._read_only.look_at_s(now_s)
        times = [now_s + TICK_S]
        edge_s = self._edge.wake_at(now_s, self._clock.now_s())
        if edge_s is not None:
            times.append(edge_s)
        if self._flush_at_s is not None:
            times.append(self._flush_at_s)
        wake_at_s = self._machine.wake_at()
        if wake_at_s is not None:
            in_s = wake_at_s - self._clock.now_s()
            times.append(max(now_s + in_s, self._machine_waits_until_s))
        return max(now_s, min(times))


def _stopped() -> ServiceStoppedError:
    return ServiceStoppedError("the controller is stopping; try again when it is back")


def _nothing(*_: object) -> None:
    pass
