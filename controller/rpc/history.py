"""What a job went through, as clients see it. Pure but for the history it reads."""

from __future__ import annotations

from itertools import pairwise

from controller.core.records import JobRecord
from controller.core.states import TERMINAL
from controller.store.history import CommitRow, History, StateRow
from outlast.chosen import is_given_up
from outlast.v1 import jobs_pb2

# In one answer, some 2 MB.
MOST, USUAL = 10_000, 1_000


def history_of(job: JobRecord, history: History, most: int) -> jobs_pb2.GetHistoryResponse:
    """So many of its newest states, and of its newest checkpoints; 0: as many as usual."""
    most = most or USUAL
    return jobs_pb2.GetHistoryResponse(
        states=_spans(history.states(job.job_id, most)),
        checkpoints=[_checkpoint(job, row) for row in history.commits(job.job_id, most)],
    )


def _spans(rows: list[StateRow]) -> list[jobs_pb2.JobSpan]:
    """Each lasts until the next begins; the last, of a job that has not ended, until now."""
    spans = [
        jobs_pb2.JobSpan(state=row.state, reason=row.reason, attempt=row.attempt, from_s=row.at_s)
        for row in rows
    ]
    for before, after in pairwise(spans):
        before.until_s = after.from_s
    if spans and spans[-1].state in TERMINAL:
        spans[-1].until_s = spans[-1].from_s
    return spans


def _checkpoint(job: JobRecord, row: CommitRow) -> jobs_pb2.JobCheckpoint:
    return jobs_pb2.JobCheckpoint(
        step=row.step,
        attempt=row.attempt,
        committed_s=row.at_s,
        size_bytes=row.size_bytes,
        is_newest=row.step == job.committed_step,
        is_given_up=is_given_up(job.chosen, row.step, row.attempt),
    )
