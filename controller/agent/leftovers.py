"""Steps in the black boxes of workers that an earlier agent of this node ran.

That agent kept its reports in its own memory until they were acknowledged, so
some may never have left. Reporting a step again is harmless; a step that nobody
reports is a hole in the loss curve.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outlast.blackbox import Reader, StepRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftSteps:
    """What is still in the black box of one rank, oldest first."""

    job_id: str
    attempt: int
    records: list[StepRecord]


def left_steps(jobs_dir: Path, memory_dir: Path) -> Iterator[LeftSteps]:
    """The steps of the newest attempt here of every job that has not been forgotten.

    A job is forgotten when its host memory is freed, and by then all is told. Every
    rank notes the same figures, so one of them speaks for the node.
    """
    for job_dir in sorted(jobs_dir.iterdir()) if jobs_dir.is_dir() else ():
        if not (memory_dir / job_dir.name).is_dir():
            continue
        attempts = {int(path.name[1:]): path for path in job_dir.glob("a*") if path.is_dir()}
        if not attempts:
            continue
        newest = max(attempts)
        for path in sorted(attempts[newest].glob("rank-*.blackbox")):
            records = _steps_in(path)
            if records:
                yield LeftSteps(job_id=job_dir.name, attempt=newest, records=records)
                break


def _steps_in(path: Path) -> list[StepRecord]:
    try:
        reader = Reader(path)
    except (OSError, ValueError) as error:
        # A worker that died before its black box was whole had completed nothing.
        logger.info("black box left out: %s", error)
        return []
    try:
        return reader.new_steps()
    finally:
        reader.close()
