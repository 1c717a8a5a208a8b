"""What made a turn of the machine fail, and what is done about it.

An event that is the cause is marked in the journal and skipped once. A job whose state is the
cause is set aside: nothing is decided about it until a person asks for something or the
controller is started again, and events are handled as ever.

After such a turn nothing in memory is trusted: the machine is built anew from the journal,
as after a restart of the process, and agents say again what is true on their nodes. An
agent that provokes this again and again is refused for a while, and so is a kind of request
of clients. When turns fail whatever the event is, the state itself is at fault, and the
controller ends, as it must.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable

from controller.core.changes import State
from controller.core.events import CommandFinished, Event, TimePassed
from controller.core.machine import OF_PERSONS, Machine
from controller.store.backend import DiskFullError
from controller.store.journal import Journal
from outlast.errors import FatalError, RetryableError
from outlast.ids import JobId

logger = logging.getLogger(__name__)

WINDOW_S = 600.0
# Poisoned events of one node in a window, after which it is refused until the window is over.
MAX_OF_NODE = 3
# Of one job in a window, after which the job is set aside: its state is more likely the cause.
MAX_OF_JOB = 3
# Of one kind of request about one job or node in a window, after which it is refused.
MAX_OF_REQUEST = 3
# Of one kind of request about whatever: each submission is about a job of its own.
MAX_OF_REQUEST_KIND = 6
# Of all that nodes and time bring in a window: more than one mistake of ours provokes. Requests
# of clients do not count, as no number of them says anything about the state.
MAX_OF_ALL = 16
_MAX_EVENT_CHARS = 4_000
_MAX_ERROR_CHARS = 16_000


class PoisonedError(FatalError):
    """The controller failed on this very request and skipped it."""


class NodeRefusedError(RetryableError):
    """The node's messages have made turns fail lately."""


def failed_request(error: Exception) -> PoisonedError:
    """What a client hears whose request made the controller fail."""
    return PoisonedError(
        f"the controller failed on this request and skipped it ({error!r}); nothing has "
        "happened; its log has the stack, after `poisoned event`"
    )


def job_at_fault(machine: Machine, state: State, event: Event) -> JobId | None:
    """The job whose state made `machine` fail on an event; None when the event is the cause.

    `state` is what the journal has, from before the event.

    Raises:
        Exception: whatever the event is, turns fail, and on no job's own state.
    """
    job_id = machine.job_at_work
    about = getattr(event, "job_id", None)
    # What an agent answers is about a job, too, and does not say which.
    if job_id is not None and about != job_id and not isinstance(event, CommandFinished):
        return job_id
    trial = machine.with_state(state)
    try:
        trial.handle(TimePassed(), 0.0)
    except Exception:
        if trial.job_at_work is None:
            raise
        return trial.job_at_work
    return None


def set_aside(machine: Machine, job_id: JobId, error: Exception) -> None:
    """Have nothing decided about a job on whose state the machine fails, and say so."""
    why = (
        f"set aside: the controller fails on the state of this job ({error!r:.200}), so nothing is "
        "decided about it; what trains continues; cancel it, or start a controller that is "
        "repaired (the log of this one has the stack, after `job set aside`)"
    )
    logger.error("alert: job set aside: job=%s", job_id, exc_info=error)
    machine.set_aside(job_id, why)


class Poison:
    """What was skipped, and who sent it."""

    def __init__(
        self, journal: Journal, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_marked = 0
        self._journal = journal
        self._monotonic = monotonic
        # Sent again, it must not be handled again: neither now nor by the next controller.
        self._known = set(journal.poisoned_sources())
        # Jobs of which no event is handled.
        self._ignored: dict[JobId, None] = {}
        self._times: deque[tuple[float, str, JobId | None]] = deque()
        # When a client's request failed, what kind it was and about which job or node.
        self._requests: deque[tuple[float, str, str]] = deque()

    def is_known(self, source: str) -> bool:
        """Whether a message from `source` (node/incarnation/number) is to be skipped."""
        return source in self._known

    def check_node(self, node: str) -> None:
        """Let a node connect.

        Raises:
            NodeRefusedError: not for a while.
        """
        self._forget_old()
        times = [at_s for at_s, source, _ in self._times if source.partition("/")[0] == node]
        if len(times) >= MAX_OF_NODE:
            after_s = times[0] + WINDOW_S - self._monotonic()
            raise NodeRefusedError(
                f"node {node}: {len(times)} of its messages made the controller fail within "
                f"{WINDOW_S:.0f} s (its log says how, after `poisoned event`); refused for "
                f"{after_s:.0f} s more",
                after_s=after_s,
            )

    def check_request(self, event: Event) -> None:
        """Let a client's request be handled.

        Raises:
            PoisonedError: not for a while.
        """
        self._forget_old()
        kind, about = _kind_and_subject(event)
        of_kind = [at_s for at_s, other, _ in self._requests if other == kind]
        of_same = [at_s for at_s, *other in self._requests if other == [kind, about]]
        if len(of_same) >= MAX_OF_REQUEST:
            times, what = of_same, f"{kind} for {about}"
        elif len(of_kind) >= MAX_OF_REQUEST_KIND:
            times, what = of_kind, kind
        else:
            return
        raise PoisonedError(
            f"the controller failed on this request (`{what}`) {len(times)} times within "
            f"{WINDOW_S:.0f} s and refuses it for {times[0] + WINDOW_S - self._monotonic():.0f} s "
            "more; nothing has happened; its log has the stack, after `poisoned event`"
        )

    def count_request(self, event: Event) -> None:
        """Note that a client's request made the controller fail."""
        kind, about = _kind_and_subject(event)
        self._requests.append((self._monotonic(), kind, about))

    def ignores(self, event: Event) -> bool:
        """Whether an event is about a job whose events have made turns fail too often.

        A person's request is one more try.
        """
        job_id = getattr(event, "job_id", None)
        if job_id in self._ignored and isinstance(event, OF_PERSONS):
            del self._ignored[job_id]
        return job_id in self._ignored

    def ignore_if_too_often(self, machine: Machine, event: Event, error: Exception) -> None:
        """Set the job of a marked event aside, with its events, when they are too many."""
        self._forget_old()
        job_id = getattr(event, "job_id", None)
        num_marked = sum(job == job_id for _, _, job in self._times)
        if num_marked < MAX_OF_JOB or job_id not in machine.state.jobs:
            return
        set_aside(machine, job_id, error)
        self._ignored[job_id] = None
        # It was the job, and not the nodes that spoke of it.
        self._times = deque(
            (at_s, "" if job == job_id else source, job) for at_s, source, job in self._times
        )

    def mark(
        self, event: Event, source: str, error: Exception, *, is_request: bool = False
    ) -> None:
        """Journal that an event is to be skipped; a client waits for it if it is a request.

        Raises:
            Exception: `error`, when turns fail so often that the events cannot be the reason.
        """
        self._forget_old()
        if is_request:
            self.count_request(event)
        elif len(self._times) >= MAX_OF_ALL:
            raise error
        else:
            self._times.append((self._monotonic(), source, getattr(event, "job_id", None)))
        what = "".join(traceback.format_exception(error))
        logger.error("poisoned event, skipped: source=%s event=%.500r\n%s", source, event, what)
        try:
            self._journal.mark_poisoned(
                source, repr(event)[:_MAX_EVENT_CHARS], what[-_MAX_ERROR_CHARS:]
            )
        except DiskFullError:
            logger.warning("the mark could not be journalled; only this controller knows of it")
        if source:
            self._known.add(source)
        self.num_marked += 1

    def _forget_old(self) -> None:
        since_s = self._monotonic() - WINDOW_S
        while self._times and self._times[0][0] < since_s:
            self._times.popleft()
        while self._requests and self._requests[0][0] < since_s:
            self._requests.popleft()


def _kind_and_subject(event: Event) -> tuple[str, str]:
    """What kind of request it is, and the job or node that it is about."""
    about = getattr(event, "job_id", None) or getattr(event, "node", None) or ""
    return type(event).__name__, str(about)
