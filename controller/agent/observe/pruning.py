"""What workers leave behind on a node (logs, black boxes, errors, stacks), kept within bounds.

What nobody has written to for long goes, and of the rest what is too much: the oldest jobs that
were forgotten here first, then the older attempts of jobs that are not: one that restarts a
thousand times leaves its newest attempts only. What belongs to a job's newest two attempts, the
one that runs and the one that failed before it, always stays.

What does not belong here: how many attempts and forgotten jobs are kept, however small they are
(`leftovers`), the size of one log (`log_files`), and host memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from controller.agent.code import delete_left_code
from controller.agent.config import AgentConfig
from controller.agent.observe.log_files import trim
from controller.agent.threads import run_blocking

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 30.0
_ALWAYS_KEPT = 2
# Folders of a start come before its host memory, by which a job is known not to be forgotten.
_YOUNG_S = 60.0
# Code is fetched before.
_CODE_YOUNG_S = 900.0
# So long after its start a node's clock has been set; one that is years ahead would delete all.
_CLOCK_SET_S = 3600.0
# Sizes as `du` counts them: logs have holes.
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFolder:
    """What an attempt has left here."""

    job: str
    attempt: int
    num_bytes: int
    written_s: float
    is_forgotten: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much is kept, and for how long."""

    max_bytes: int
    max_age_s: float


def excess(folders: Iterable[AttemptFolder], bounds: Bounds, now_s: float) -> list[AttemptFolder]:
    """What to delete so that the rest is within bounds, as far as it may be deleted."""
    newest_first = sorted(folders, key=lambda each: (each.job, -each.attempt))
    places: dict[str, int] = {}
    last_s: dict[str, float] = {}
    may_go = []
    for folder in newest_first:
        place = places[folder.job] = places.get(folder.job, -1) + 1
        last_s[folder.job] = max(last_s.get(folder.job, 0.0), folder.written_s)
        if folder.is_forgotten or place >= _ALWAYS_KEPT:
            may_go.append(folder)
    may_go.sort(
        key=lambda each: (
            not each.is_forgotten,
            last_s[each.job] if each.is_forgotten else each.written_s,
            each.attempt,
        )
    )
    left = sum(folder.num_bytes for folder in newest_first)
    gone = []
    for folder in may_go:
        if left > bounds.max_bytes or now_s - folder.written_s > bounds.max_age_s:
            gone.append(folder)
            left -= folder.num_bytes
    return gone


def found(jobs_dir: Path, memory_dir: Path, now_s: float) -> Iterator[AttemptFolder]:
    """The folders of all attempts here."""
    for job_dir in jobs_dir.iterdir() if jobs_dir.is_dir() else ():
        has_memory = (memory_dir / job_dir.name).is_dir()
        for path in job_dir.glob("a*"):
            if not path.name[1:].isdecimal():
                continue
            # Files come and go while they are looked at.
            with contextlib.suppress(FileNotFoundError):
                stats = [path.stat(), *(file.stat() for file in path.rglob("*"))]
                written_s = max(each.st_mtime for each in stats)
                yield AttemptFolder(
                    job=job_dir.name,
                    attempt=int(path.name[1:]),
                    num_bytes=sum(each.st_blocks for each in stats) * _BLOCK_BYTES,
                    written_s=written_s,
                    is_forgotten=not has_memory and now_s - written_s > _YOUNG_S,
                )


def prune(jobs_dir: Path, memory_dir: Path, bounds: Bounds, now_s: float) -> int:
    """Delete what is too old or too much; how many attempts that was."""
    gone = excess(found(jobs_dir, memory_dir, now_s), bounds, now_s)
    for folder in gone:
        job_dir = jobs_dir / folder.job
        shutil.rmtree(job_dir / f"a{folder.attempt}", ignore_errors=True)
        if folder.is_forgotten:
            # Of the last attempt of a job; others leave it in place.
            with contextlib.suppress(OSError):
                job_dir.rmdir()
    if gone:
        named = ", ".join(f"{folder.job}/a{folder.attempt}" for folder in gone[:3])
        logger.info(
            "deleted what %d old attempts left, %d MiB (limits %d MiB and %.0f days): %s%s",
            len(gone),
            sum(folder.num_bytes for folder in gone) >> 20,
            bounds.max_bytes >> 20,
            bounds.max_age_s / 86_400,
            named,
            ", ..." if len(gone) > 3 else "",
        )
    return len(gone)


class Pruning:
    """Keeps one agent's state within its bounds."""

    def __init__(
        self, state_dir: Path, memory_dir: Path, bounds: Bounds, *, max_log_bytes: int
    ) -> None:
        self._jobs_dir = state_dir / "jobs"
        self._standby_log = state_dir / "standby.log"
        self._code_dir = state_dir / "code"
        self._memory_dir = memory_dir
        self._bounds = bounds
        self._max_log_bytes = max_log_bytes
        self._begun_s = time.monotonic()

    @classmethod
    def of(cls, config: AgentConfig) -> Pruning:
        """That of an agent."""
        bounds = Bounds(max_bytes=config.state_bytes, max_age_s=config.state_age_s)
        most = config.rank_log_bytes
        return cls(config.state_dir, config.memory_dir, bounds, max_log_bytes=most)

    async def run(self) -> None:
        """Look for as long as the agent lives."""
        while True:
            await run_blocking(self.look, "pruning")
            await asyncio.sleep(LOOK_PERIOD_S)

    def look(self) -> None:
        """Delete what is too old or too much now."""
        bounds = self._bounds
        if time.monotonic() < self._begun_s + _CLOCK_SET_S:
            bounds = replace(bounds, max_age_s=math.inf)
        prune(self._jobs_dir, self._memory_dir, bounds, time.time())
        delete_left_code(self._code_dir, self._memory_dir, older_than_s=time.time() - _CODE_YOUNG_S)
        with contextlib.suppress(FileNotFoundError):
            trim(self._standby_log, self._max_log_bytes)
