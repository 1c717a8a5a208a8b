"""What a job went through, as clients see it, in pages. Pure but for the history it reads.

A page ends at the number of a state and the step of a checkpoint, and the next one has what is
below them. Both stay what they are while newer ones come in and the oldest are dropped, so that
pages neither skip nor repeat any; a position in a list would move.
"""

from __future__ import annotations

import re
from itertools import pairwise

from controller.core.records import JobRecord
from controller.core.states import TERMINAL
from controller.store.history import CommitRow, History, StateRow
from outlast.chosen import is_given_up
from outlast.problems import FieldProblem
from outlast.v1 import jobs_pb2

# In one answer, some 2 MB.
MOST, USUAL = 10_000, 1_000
STATES, CHECKPOINTS = "states", "checkpoints"
# The number of a state and a step, each absent while its list was not asked for. 18 digits fit into
# the 64 bits that databases have for them.
_PLACE = re.compile(r"(?=.*[0-9])([0-9]{0,18})-([0-9]{0,18})")


def wrong_with_history(request: jobs_pb2.GetHistoryRequest) -> FieldProblem | None:
    """What of a request makes no sense."""
    if not 0 <= request.most <= MOST:
        allowed = f"1 to {MOST}, or 0 for {USUAL}"
        return FieldProblem(field="most", message=f"is {request.most}; allowed: {allowed}")
    if request.only not in ("", STATES, CHECKPOINTS):
        allowed = f"{STATES}, {CHECKPOINTS}, or nothing for both"
        return FieldProblem(field="only", message=f"is {request.only!r}; allowed: {allowed}")
    if request.after and _PLACE.fullmatch(request.after) is None:
        allowed = "`next` of the page before, such as 120-4000"
        return FieldProblem(field="after", message=f"is {request.after!r}; allowed: {allowed}")
    return None


def history_of(
    job: JobRecord, history: History, request: jobs_pb2.GetHistoryRequest
) -> jobs_pb2.GetHistoryResponse:
    """A page of its states, and of its checkpoints; the request is as it should be."""
    most = request.most or USUAL
    number, step = _place(request.after)
    answer, has_more = jobs_pb2.GetHistoryResponse(), False
    # Of either list, one more says whether there are more. A list that has come to its end stays
    # there: what is new in it belongs to no older page.
    if request.only != CHECKPOINTS:
        rows = history.states(job.job_id, most + 1, before=number)
        page = rows[-most:]
        answer.states.extend(_spans(page, _state_at(job, history, number)))
        number = page[0].number if page else number or 0
        has_more = len(rows) > most
    if request.only != STATES:
        commits = history.commits(job.job_id, most + 1, before=step)
        shown = commits[-most:]
        answer.checkpoints.extend(_checkpoint(job, row) for row in shown)
        step = shown[0].step if shown else step or 0
        has_more = has_more or len(commits) > most
    if has_more:
        answer.next = "-".join("" if each is None else str(each) for each in (number, step))
    return answer


def _place(after: str) -> tuple[int | None, int | None]:
    number, _, step = after.partition("-")
    return int(number) if number else None, int(step) if step else None


def _state_at(job: JobRecord, history: History, number: int | None) -> StateRow | None:
    """The first state of the page before, at which the last one of this page ended."""
    if number is None:
        return None
    rows = history.states(job.job_id, 1, before=number + 1)
    return rows[0] if rows and rows[0].number == number else None


def _spans(rows: list[StateRow], following: StateRow | None) -> list[jobs_pb2.JobSpan]:
    """Each lasts until the next begins; the last, of a job that has not ended, until now."""
    spans = [
        jobs_pb2.JobSpan(state=row.state, reason=row.reason, attempt=row.attempt, from_s=row.at_s)
        for row in rows
    ]
    for before, after in pairwise(spans):
        before.until_s = after.from_s
    if spans and following is not None:
        spans[-1].until_s = following.at_s
    elif spans and spans[-1].state in TERMINAL:
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
