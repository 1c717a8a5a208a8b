"""The controller's only loop: events in, the machine, the journal, then the effects.

Events wait in a queue. Each turn takes what is there, lets the machine handle
it, appends the changes of all of it in one commit, and only then runs the other
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
from collections.abc import Callable, Sequence

from controller.changes import Changes
from controller.core.changes import JobPut, NodeForgotten, State, StateChange
from controller.core.edge.edge import Edge
from controller.core.events import ControllerStarted, Event, TimePassed
from controller.core.machine import Machine
from controller.core.records import JobRecord
from controller.core.settings import Settings
from controller.core.states import TERMINAL
from controller.curve_writer import CurveWriter
from controller.deciding import Decider
from controller.effects import Effects
from controller.guard import Guard
from controller.items import Item
from controller.judging import Judging
from controller.node_history import NodeHistory
from controller.poison import Poison
from controller.read_only import ReadOnly
from controller.refusals import ServiceStoppedError
from controller.store.backend import DiskFullError
from controller.store.curves import Curves, StepRow
from controller.store.history import History
from controller.store.journal import Journal
from controller.store.reserve import Reserve
from outlast.clock import Clock
from outlast.errors import OutlastError
from outlast.ids import JobId, NodeId

logger = logging.getLogger(__name__)

# The loop wakes at least this often, so that a pause of the process is noticed.
TICK_S = 1.0
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
        history: History,
        edge: Edge,
        effects: Effects,
        clock: Clock,
        reserve: Reserve | None = None,
    ) -> None:
        self.changes = Changes()
        self.curves = curves
        self.history = history
        # Called with nodes for which other limits may hold than before.
        self.on_refreshed: Callable[[Sequence[NodeId]], None] = _nothing
        # Called with each node that is on no list any more.
        self.on_forgotten: Callable[[NodeId], None] = _nothing
        # Called when the machine has forgotten what it saw: agents have to join again.
        self.on_restored: Callable[[], None] = _nothing
        self.guard = Guard()
        self.node_history = NodeHistory()
        # The controller ends in order, and takes nodes of its own along.
        self.is_leaving = False
        self._machine = machine
        self._journal = journal
        self._edge = edge
        self._clock = clock
        self._awake = asyncio.Event()
        self._stopping = False
        self._judging = Judging(edge, self.guard, self.post)
        self._curve_writer = CurveWriter(curves, history)
        self._machine_waits_until_s = 0.0
        self._read_only = ReadOnly(journal, reserve, self.changes.fire)
        self._decider = Decider(
            machine,
            journal,
            effects,
            clock=clock,
            guard=self.guard,
            read_only=self._read_only,
            on_restored=self._restored,
        )

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

    def owner_of(self, job_id: str) -> str | None:
        """Who submitted a job; None when there is none."""
        job = self._machine.state.jobs.get(JobId(job_id))
        return None if job is None else job.owner

    def queue(self) -> list[JobRecord]:
        """The jobs that wait for their nodes, by their turn."""
        return self._machine.queue()

    @property
    def settings(self) -> Settings:
        """Bounds of the fleet as a whole."""
        return self._machine.settings

    @property
    def poison(self) -> Poison:
        """What made turns fail."""
        return self._decider.poison

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
        self._decider.begin_read_only(why)

    def post(self, *events: Event) -> None:
        """Queue events that nobody waits for."""
        if events:
            self.offer(events)
        elif self._edge.has_judgements and not self.read_only:
            # What brought none may have brought a hang to be judged.
            self._awake.set()

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
        self._decider.queue.append(
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
        self._decider.refuse_requests(_stopped())
        self._decider.queue.clear()
        self._awake.set()

    async def run(self) -> None:
        """Handle events until `stop`; any error is the end of the controller."""
        loop = asyncio.get_running_loop()
        self._edge.expect_known(loop.time())
        self.history.catch_up(self.state.jobs.values())
        self.post(ControllerStarted(term=self._journal.term))
        while not self._stopping:
            due_s = self._next_due_s(loop.time())
            if not self._decider.queue or self.read_only:
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
        self._judging.cancel()
        self._write_curves()

    def _turn(self, now_s: float, due_s: float) -> None:
        self._edge.listening.note_pause(due_s, now_s)
        if self.read_only and not self._may_write_again(now_s):
            return
        self._look_around(now_s)
        items, changes = self._decider.decide()
        self._continue_snapshot()
        if self._decider.queue or self._journal.is_writing_snapshot:
            self._awake.set()
        self._curve_writer.take(items, changes, now_s)
        has_ended = any(isinstance(f, JobPut) and f.job.state in TERMINAL for f in changes)
        is_due = self._curve_writer.is_due(now_s)
        # Whoever sees that a job has ended must see its whole curve.
        if has_ended or is_due:
            self._write_curves()
        self._curve_writer.tell_durable(items)
        self.guard.call("watch", None, lambda: self._refresh(changes, now_s))
        if changes or is_due:
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
            # The changes that it would have replaced are all there, and smaller than it.
            logger.warning("no room for a snapshot of the journal, tried again later: %s", error)
            self._journal.drop_snapshot()

    def _refresh(self, changes: Sequence[StateChange], now_s: float) -> None:
        changed = self._edge.refresh(changes, now_s)
        if changed:
            self.on_refreshed(changed)
        self.node_history.note(changes, self.now_s)
        for change in changes:
            if isinstance(change, NodeForgotten):
                self.on_forgotten(change.node)

    def _look_around(self, now_s: float) -> None:
        """Queue what follows from nothing but the passing of time."""
        wall_s = self._clock.now_s()
        events: list[Event] = []
        self.guard.call("watch", None, lambda: events.extend(self._edge.wake(now_s, wall_s)))
        self.post(*events)
        self._judging.begin()
        wake_at_s = self._machine.wake_at()
        is_due = wake_at_s is not None and self._clock.now_s() >= wake_at_s
        if is_due and now_s >= self._machine_waits_until_s:
            self._machine_waits_until_s = now_s + SHORTEST_TIMER_S
            self.post(TimePassed())

    def _restored(self) -> None:
        """The machine was built anew from the journal, as in a controller that has just started."""
        self._edge.expect_known(asyncio.get_running_loop().time())
        self.on_restored()
        self.changes.fire()

    def _write_curves(self) -> None:
        try:
            self._curve_writer.flush()
        except DiskFullError as error:
            self.begin_read_only(str(error))

    def _next_due_s(self, now_s: float) -> float:
        """When the loop must run at the latest, by the monotonic clock."""
        if self.read_only:
            return self._read_only.look_at_s(now_s)
        times = [now_s + TICK_S]
        edge_s = self._edge.wake_at(now_s, self._clock.now_s())
        if edge_s is not None:
            times.append(edge_s)
        if self._curve_writer.due_s is not None:
            times.append(self._curve_writer.due_s)
        wake_at_s = self._machine.wake_at()
        if wake_at_s is not None:
            in_s = wake_at_s - self._clock.now_s()
            times.append(max(now_s + in_s, self._machine_waits_until_s))
        return max(now_s, min(times))


def _stopped() -> ServiceStoppedError:
    return ServiceStoppedError("the controller is stopping; try again when it is back")


def _nothing(*_: object) -> None:
    pass
