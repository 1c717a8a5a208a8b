"""What workers left behind: steps that nobody reported yet, and logs that nobody reads any more.

An earlier agent of this node kept its reports in its own memory until they were
acknowledged, so some may never have left. Reporting a step again is harmless; a
step that nobody reports is a hole in the loss curve.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outlast.blackbox import BlackBoxError, Reader, StepRecord
from outlast.worker_contract import ALL_BLACKBOXES

logger = logging.getLogger(__name__)

# `outlast logs` reads them after the end of a job; a disk that fills up stops the next one.
KEPT_LOGS = 16

# Of one job, besides the one that starts: a rank's black box alone has more than half a megabyte,
# and a job of weeks may have hundreds of attempts.
KEPT_ATTEMPTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftSteps:
    """What is still in the black box of one rank, oldest first."""

    job_id: str
    attempt: int
    records: list[StepRecord]


def left_steps(jobs_dir: Path, memory_dir: Path) -> Iterator[LeftSteps]:
    """The steps of the newest attempt here of every job that has not been forgotten.

    A job is forgotten when its host memory is freed, and by then all is reported. Every
    rank notes the same figures, so one of them speaks for the node.
    """
    for job_dir in sorted(jobs_dir.iterdir()) if jobs_dir.is_dir() else ():
        if not (memory_dir / job_dir.name).is_dir():
            continue
        attempts = _attempts(job_dir)
        if not attempts:
            continue
        newest = max(attempts)
        for path in sorted(attempts[newest].glob(ALL_BLACKBOXES)):
            records = _steps_in(path)
            if records:
                yield LeftSteps(job_id=job_dir.name, attempt=newest, records=records)
                break


def delete_old_attempts(job_dir: Path) -> None:
    """Delete what the workers of a job's older attempts left, all but the newest few."""
    attempts = _attempts(job_dir)
    for number in sorted(attempts)[: -KEPT_ATTEMPTS - 1]:
        shutil.rmtree(attempts[number], ignore_errors=True)


def delete_old_logs(jobs_dir: Path, memory_dir: Path, *, newest: str = "") -> None:
    """Delete logs and black boxes of forgotten jobs, all but those of the newest few.

    `newest` is the job that was forgotten just now, whatever the clock says of its files.
    """
    forgotten = [
        job_dir
        for job_dir in (jobs_dir.iterdir() if jobs_dir.is_dir() else ())
        if not (memory_dir / job_dir.name).is_dir()
    ]
    # The time is that of its last attempt, or later: a clock that was set back would put a
    # new job behind old ones.
    times_s = {job_dir: job_dir.stat().st_mtime for job_dir in forgotten}
    latest = jobs_dir / newest
    if latest in times_s:
        others_s = max(
            (at_s for job_dir, at_s in times_s.items() if job_dir != latest), default=0.0
        )
        if times_s[latest] <= others_s:
            times_s[latest] = others_s + 1.0
            os.utime(latest, (times_s[latest], times_s[latest]))
    forgotten.sort(key=lambda job_dir: times_s[job_dir], reverse=True)
    for job_dir in forgotten[KEPT_LOGS:]:
        shutil.rmtree(job_dir, ignore_errors=True)
        logger.info("logs of a forgotten job are deleted: job=%s", job_dir.name)


def _attempts(job_dir: Path) -> dict[int, Path]:
    return {
        int(path.name[1:]): path
        for path in job_dir.glob("a*")
        if path.name[1:].isdecimal() and path.is_dir()
    }


def _steps_in(path: Path) -> list[StepRecord]:
    try:
        reader = Reader(path)
    except (OSError, ValueError) as error:
        # A worker that died before its black box was whole had completed nothing.
        logger.info("black box left out: %s", error)
        return []
    try:
        return reader.new_steps()
    except BlackBoxError as error:
        logger.info("black box left out: %s", error)
        return []
    finally:
        reader.close()
