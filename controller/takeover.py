"""How a controller comes to be the only one on a state directory and a journal.

At once, or with `--wait` when another one has ended, or does not renew its lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TypeVar

from controller import state_dir
from controller.assembly import open_database
from controller.options import Options
from controller.store.backend import DatabaseError, DatabaseTakenError
from controller.store.lease import Lease
from controller.store.lock import LockedError, StateLock

logger = logging.getLogger(__name__)

# Between two looks at what another controller has: nothing beside the seconds for which agents
# pause before they connect again.
LOOK_S = 0.25
# How long a database may be another's for one that does not wait: its server ends the session of a
# controller that was killed a moment ago when it comes to it.
_LINGERS_S = 2.0
_Taken = TypeVar("_Taken")


class StoppedError(Exception):
    """This controller was asked to stop while it waited."""


async def begin_alone(
    options: Options,
    stop: asyncio.Event,
    stack: AsyncExitStack,
    on_wait: Callable[[str], None],
) -> tuple[StateLock, Lease]:
    """The state directory and the journal, which no other controller has; `stack` gives them back.

    `on_wait` is called with what is waited for, whenever that is something else than before.

    Raises:
        StoppedError: while they were waited for.
        LockedError, DatabaseTakenError: another controller has them, and it does not wait.
        DatabaseError: the journal cannot be used.
    """
    open_dir = partial(state_dir.open_state_dir, options.state_dir, looks_first=options.wait)
    lock = await _taken(open_dir, options, stop, on_wait)
    stack.callback(lock.close)
    if options.fresh:
        state_dir.forget_jobs(options.state_dir)
    state_dir.use_journal(options.state_dir, is_here=options.journal is None)
    claim = _Claim(options)
    stack.callback(claim.close)
    return lock, await _taken(claim.take, options, stop, on_wait)


class _Claim:
    """One controller's tries to have the database for itself."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lease: Lease | None = None

    def take(self) -> Lease:
        """The database and its lease, which are ours.

        Raises:
            DatabaseTakenError: another controller has them.
            DatabaseError: the database does not answer; the next try connects anew.
        """
        if self._lease is None:
            self._lease = Lease(open_database(self._options))
        try:
            self._try(self._lease)
        except DatabaseTakenError:
            raise
        except DatabaseError:
            self.close()
            raise
        return self._lease

    def close(self) -> None:
        """Give the database back."""
        if self._lease is not None:
            self._lease.database.close()
            self._lease = None

    def _try(self, lease: Lease) -> None:
        try:
            lease.take()
        except DatabaseTakenError:
            if self._options.wait:
                lease.end_if_over(asyncio.get_running_loop().time())
            raise


async def _taken(
    take: Callable[[], _Taken],
    options: Options,
    stop: asyncio.Event,
    on_wait: Callable[[str], None],
) -> _Taken:
    """What `take` gives, tried again while another controller has it if that was asked.

    Raises:
        StoppedError: this controller was asked to stop meanwhile.
    """
    said, clock = "", asyncio.get_running_loop()
    lingers_until_s = clock.time() + _LINGERS_S
    while not stop.is_set():
        try:
            return take()
        except (LockedError, DatabaseError) as error:
            lingers = isinstance(error, DatabaseTakenError) and clock.time() < lingers_until_s
            # One that has waited waits for a database that is away, too; before, it is a mistake.
            is_taken = isinstance(error, LockedError | DatabaseTakenError)
            if not lingers and not (options.wait and (is_taken or said)):
                raise
            if options.wait and said != str(error):
                # What follows the fact is advice for one that does not wait.
                on_wait(str(error).partition("; ")[0])
                logger.info("controller waits: %s", error)
            said = str(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await stop.wait()
    raise StoppedError
