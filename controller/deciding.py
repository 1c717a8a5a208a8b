"""Events into state changes: the machine handles what waits, the journal keeps it, effects run.

When the machine fails on an event, the event is marked in the journal and skipped, or the job
whose state is the cause is set aside, and the machine is built anew from the journal
(`poison`). Deciding and committing happen without yielding: nobody can see a state that is not
durable.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from controller.core.changes import StateChange
from controller.core.effects import Effect, Persist
from controller.core.events import ControllerStarted, Event
from controller.core.machine import OF_PERSONS, Machine
from controller.effects import Effects
from controller.guard import Guard
from controller.items import Item
from controller.poison import Poison, failed_request, job_at_fault, set_aside
from controller.read_only import ReadOnly
from controller.store.backend import DiskFullError
from controller.store.journal import Journal
from controller.transition_log import TransitionLog
from outlast.clock import Clock
from outlast.crashpoints import CrashPoint, reach
from outlast.errors import OutlastError

# Items in one commit: enough to keep up with thousands of agents that reconnect at
# once, few enough that the first of them does not wait for long.
BATCH_ITEMS = 256
# So long events are handled in one turn; then agents and clients are read before the rest.
TURN_S = 0.25


class Decider:
    """What waits to be decided, and how it is."""

    def __init__(
        self,
        machine: Machine,
        journal: Journal,
        effects: Effects,
        *,
        clock: Clock,
        guard: Guard,
        read_only: ReadOnly,
        on_restored: Callable[[], None],
    ) -> None:
        """`on_restored` is called when the machine has forgotten all that it saw."""
        self.queue: deque[Item] = deque()
        self.poison = Poison(journal)
        self._machine = machine
        self._journal = journal
        self._effects = effects
        self._clock = clock
        self._guard = guard
        self._read_only = read_only
        self._on_restored = on_restored
        self._transition_log = TransitionLog(machine.state)
        # Items to be handled in turns of their own: one of them cannot be journalled.
        self._num_alone = 0

    def begin_read_only(self, why: str) -> None:
        """Decide nothing until there is room on the journal's disk."""
        self._read_only.begin(why)
        self.refuse_requests(self._read_only.refusal())

    def refuse_requests(self, error: OutlastError) -> None:
        """Nothing comes of the requests that wait; what agents report goes on waiting."""
        requests = [item for item in self.queue if item.is_request]
        self.queue = deque(item for item in self.queue if not item.is_request)
        for request in requests:
            request.refuse(error)

    def decide(self) -> tuple[list[Item], list[StateChange]]:
        """Let the machine handle what waits, journal its changes, then run the rest.

        What was handled, and the changes.

        Raises:
            Exception: the state itself is at fault; the controller has to end.
        """
        clock_s = asyncio.get_running_loop().time
        until_s = clock_s() + TURN_S
        items: list[Item] = []
        changes: list[StateChange] = []
        effects: list[Effect] = []
        most = 1 if self._num_alone else BATCH_ITEMS
        self._num_alone = max(0, self._num_alone - 1)
        while self.queue and len(items) < most and (not items or clock_s() < until_s):
            item = self.queue.popleft()
            items.append(item)
            if not self._handle(items, changes, effects):
                # It has been skipped; what the machine has seen is to be said again first.
                return items, changes
        if changes and not self._append(items, changes):
            return [], []
        for effect in effects:
            self._guard.call("effects", None, partial(self._effects.run, effect))
        if effects:
            reach(CrashPoint.EFFECTS_RUN)
        return items, changes

    def _handle(self, items: list[Item], changes: list[StateChange], effects: list[Effect]) -> bool:
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
                if changes and not self._append(items, changes):
                    items.clear()
                    changes.clear()
                    return False
                self._skip_cause(item, event, error)
                return False
            for effect in batch:
                if isinstance(effect, Persist):
                    changes.extend(effect.changes)
                else:
                    effects.append(effect)
        return True

    def _append(self, items: Sequence[Item], changes: Sequence[StateChange]) -> bool:
        """Journal changes; False when they cannot be written down, and are gone.

        Then the items are tried again one by one, and the one alone is skipped.
        """
        reach(CrashPoint.CHANGES_DECIDED)
        try:
            self._append_or_use_reserve(changes)
        except DiskFullError as error:
            # None of it has happened. It is tried again when there is room.
            self.queue.extendleft(reversed(items))
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
                self.queue.extendleft(reversed(items))
                self._restore()
            return False
        reach(CrashPoint.CHANGES_KEPT)
        self._guard.call("log", None, lambda: self._transition_log.tell(changes))
        return True

    def _append_or_use_reserve(self, changes: Sequence[StateChange]) -> None:
        try:
            self._journal.append(changes)
        except DiskFullError as error:
            if not self._read_only.give_up_reserve():
                raise
            self._journal.append(changes)
            self.begin_read_only(str(error))

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
            self.queue.appendleft(replace(item, events=rest))
        self._restore()

    def _skip(self, item: Item, event: Event, error: Exception) -> None:
        """Mark an event as poisonous, and continue from the journal without it."""
        self.poison.mark(event, item.source, error, is_request=item.is_request)
        item.refuse(failed_request(error))
        self._restore()

    def _restore(self) -> None:
        """Build the machine anew from the journal, as a controller that has just started."""
        self._machine.restore(self._journal.load())
        self._transition_log = TransitionLog(self._machine.state)
        self._on_restored()
        self.queue.appendleft(Item(events=(ControllerStarted(term=self._journal.term),)))
