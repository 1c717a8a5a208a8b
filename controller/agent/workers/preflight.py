"""What of a spec only a node can see: looked at before any rank is started, all at once.

A place that the spec names is a problem of that field, as on submit, and ends the job with what
to change; no process has been made by then. Data in the node's own file system may be missing on
this node alone: other nodes are looked at, too.

Checkpoint storage that does not answer is no problem of a field: it is asked again with growing
pauses, for as long as workers would wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Protocol

from checkpoint.core.pacing import backoff_s
from checkpoint.loading import wrong_to_load
from checkpoint.storage.drivers import missing_driver
from checkpoint.storage.root_owner import Owner
from checkpoint.storage.storage import Storage
from controller.agent.threads import run_blocking
from controller.agent.workers import launch
from controller.agent.workers.launch import StartRefusedError
from outlast.errors import OccupiedError, OutlastError, RetryableError
from outlast.failures import ErrorKind
from outlast.problems import FieldProblem, shown
from outlast.remote.disk import BlockFolder
from outlast.remote.files import RemoteFiles
from outlast.spec import JobSpec
from outlast.tokens.fit import is_on_node, look_at_data
from outlast.v1 import agents_pb2

logger = logging.getLogger(__name__)

# Places that were found right; a node that forgets one looks again.
_MAX_KNOWN = 1_000


class Probe(Protocol):
    """Refuses where checkpoints cannot be kept, as `launch.check_storage` does."""

    async def __call__(self, url: str, owner: Owner | None, timeout_s: float) -> None: ...


class Preflight:
    """Looks at the places of each job's spec once; a restart does not wait for them."""

    def __init__(
        self,
        probe_s: float,
        waiting: Callable[[str, str], None],
        probe: Probe = launch.check_storage,
        *,
        data_dir: Path,
    ) -> None:
        """`probe_s` is how long checkpoint storage may take to answer one `probe`.

        `data_dir` is the node's, where what was read of remote tokens is kept.
        `waiting` is called with a job and the reason for which its start waits for storage.
        """
        self._probe_s = probe_s
        self._waiting = waiting
        self._data_dir = data_dir
        self._probe = probe
        # Field, place and job of what was found right.
        self._known: dict[tuple[str, str, str], None] = {}

    async def check(self, command: agents_pb2.Command, spec: JobSpec) -> None:
        """Look at what the ranks of a start command will need.

        Raises:
            StartRefusedError: with every problem that was found.
        """
        start = command.start_workers
        job_id = command.job_id
        source = ("data", spec.data.model_dump_json(), job_id)
        problems = await self._once(source, lambda: self._look_at_data(spec))
        # What is missing in a store is missing for every node.
        kind = ErrorKind.MISSING if problems and is_on_node(spec) else ErrorKind.CONFIG
        if launch.should_try_storage(command):
            elsewhere = await self._storage(start.checkpoint_url, command, spec)
            load = spec.checkpoint.load
            if load is not None:
                elsewhere += await self._once(
                    ("checkpoint.load", load, job_id), lambda: _load(spec, load)
                )
            if elsewhere:
                # Of those no other node has a better sight.
                kind, problems = ErrorKind.CONFIG, [*problems, *elsewhere]
        if problems:
            raise StartRefusedError(kind, _in_words(problems))

    def _look_at_data(self, spec: JobSpec) -> list[FieldProblem] | None:
        """Problems of the data; None where its store does not answer.

        Raises:
            StartRefusedError: this node's disk is full, or fails.
        """
        cache = BlockFolder(self._data_dir / "blocks", max_bytes=spec.data.cache_bytes)
        # Ranks have more patience.
        with closing(RemoteFiles(cache, patience_s=self._probe_s / 2)) as files:
            try:
                return look_at_data(spec, files.open)[0]
            except RetryableError as error:
                logger.warning("data not looked at, ranks will try again: %s", error)
                return None
            except OccupiedError as error:
                raise StartRefusedError(ErrorKind.OCCUPIED, f"data.tokens: {error}") from error
            except OSError as error:
                raise StartRefusedError(
                    ErrorKind.RESOURCE, f"data cannot be read on this node: {error}"
                ) from error

    async def _storage(
        self, url: str, command: agents_pb2.Command, spec: JobSpec
    ) -> list[FieldProblem]:
        key = ("checkpoint.url", url, command.job_id)
        if key in self._known:
            return []
        try:
            await self._patiently(url, command, spec.recovery.first_step_timeout_s / 2)
        except StartRefusedError as error:
            if error.kind is ErrorKind.STORAGE:
                raise
            given = spec.checkpoint.url
            is_given = "is not given" if given is None else f"is {shown(given)}"
            return [FieldProblem(field="checkpoint.url", message=f"{is_given}; {error}")]
        self._note(key)
        return []

    async def _patiently(self, url: str, command: agents_pb2.Command, patience_s: float) -> None:
        """Ask storage until it answers or refuses; StartRefusedError when it does neither."""
        loop = asyncio.get_running_loop()
        began_s, call_s = loop.time(), min(self._probe_s, patience_s)
        for num_failures in itertools.count(1):
            try:
                await self._probe(url, launch.owner_of(command), call_s)
                return
            except StartRefusedError as error:
                wait_s = backoff_s(num_failures, random.random())
                asked_s = loop.time() - began_s
                if error.kind is not ErrorKind.STORAGE:
                    raise
                if asked_s + wait_s + call_s > patience_s:
                    raise StartRefusedError(
                        error.kind, f"{error}; asked {num_failures} times in {asked_s:.0f} s"
                    ) from error
                self._waiting(command.job_id, str(error))
            await asyncio.sleep(wait_s)

    async def _once(
        self, key: tuple[str, str, str], look: Callable[[], list[FieldProblem] | None]
    ) -> list[FieldProblem]:
        """Problems of a place that was not found right before.

        `look` returns None where the place could not be read; the next start tries again.
        """
        if key in self._known:
            return []
        try:
            async with asyncio.timeout(self._probe_s):
                problems = await run_blocking(look, "preflight")
        except TimeoutError:
            # A slow file system may still serve a rank, which has more time.
            return []
        if problems is None:
            return []
        if not problems:
            self._note(key)
        return problems

    def _note(self, key: tuple[str, str, str]) -> None:
        self._known[key] = None
        while len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]


def _load(spec: JobSpec, url: str) -> list[FieldProblem] | None:
    missing = missing_driver(url)
    if missing is not None:
        return [FieldProblem(field="checkpoint.load", message=f"is {shown(url)}; {missing}")]
    try:
        return wrong_to_load(spec, url, Storage(url))
    except ValueError as error:
        return [FieldProblem(field="checkpoint.load", message=f"is {shown(url)}; {error}")]
    except (OutlastError, OSError):
        # The worker that loads from a storage waits for it where it does not answer.
        return None


def _in_words(problems: list[FieldProblem]) -> str:
    return "; ".join(f"{problem.field} {problem.message}" for problem in problems)
