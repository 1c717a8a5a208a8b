"""What jobs went through: their states with the attempt of each, and committed checkpoints.

Not part of the journal: nothing is decided by it. It is written beside the loss curves, a moment
after it happened; what a crash loses in that moment is made up for from the journal by
`catch_up`, as far as it has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields

import sqlalchemy as sa

from controller.core.changes import JobPut, StateChange
from controller.core.records import JobRecord
from controller.store.backend import DiskFullError
from controller.store.database import Database
from controller.store.tables import COMMITS, JOB_STATES
from outlast.ids import JobId

# Of one job. One that is restarted every five minutes for two weeks has as many states.
MAX_STATES = 20_000
# Of one job: a checkpoint every five minutes for a month is half of it.
MAX_COMMITS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRow:
    """A job came into a state, or an attempt began."""

    job: JobId
    number: int
    """Rises by one from each state of the job to its next."""
    at_s: float
    attempt: int
    state: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRow:
    """A checkpoint of a job was committed."""

    job: JobId
    step: int
    attempt: int = 0
    at_s: float = 0.0
    size_bytes: int = 0


class History:
    """The states and checkpoints of every job."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._states: list[StateRow] = []
        self._commits: list[CommitRow] = []
        # Of each job what was noted last.
        self._last: dict[JobId, StateRow] = {}
        newest = sa.select(JOB_STATES.c.job_id, sa.func.max(JOB_STATES.c.number).label("number"))
        last = newest.group_by(JOB_STATES.c.job_id).subquery()
        query = sa.select(JOB_STATES).join(
            last,
            sa.and_(JOB_STATES.c.job_id == last.c.job_id, JOB_STATES.c.number == last.c.number),
        )
        with database.transaction() as connection:
            for row in connection.execute(query):
                self._last[JobId(row.job_id)] = _state_of(row)

    @property
    def has_unwritten(self) -> bool:
        """Whether `flush` has something to write."""
        return bool(self._states or self._commits)

    def catch_up(self, jobs: Iterable[JobRecord]) -> None:
        """Note what the journal knows and is not here."""
        for job in jobs:
            self._note(job)
            if job.committed_step is not None:
                # One that is here is known better.
                self._commits.append(CommitRow(job=job.job_id, step=job.committed_step))

    def take(self, changes: Iterable[StateChange]) -> None:
        """Note what these changes are to states of jobs."""
        for change in changes:
            if isinstance(change, JobPut):
                self._note(change.job)

    def committed(self, row: CommitRow) -> None:
        """Note a checkpoint that is in storage."""
        self._commits.append(row)

    def flush(self) -> None:
        """Write what was noted.

        Raises:
            DiskFullError: nothing was written; it goes on waiting.
        """
        if not self.has_unwritten:
            return
        insert = self._database.insert(COMMITS)
        # The same step again is another checkpoint when another attempt has saved it.
        upsert = insert.on_conflict_do_update(
            index_elements=["job_id", "step"],
            set_={name: insert.excluded[name] for name in ("attempt", "at_s", "size_bytes")},
            where=insert.excluded.attempt > COMMITS.c.attempt,
        )
        with self._database.write() as connection:
            if self._states:
                connection.execute(sa.insert(JOB_STATES), [_values(row) for row in self._states])
                for row in self._states:
                    _trim_states(connection, row)
            if self._commits:
                connection.execute(upsert, [_values(row) for row in self._commits])
                for job in dict.fromkeys(row.job for row in self._commits):
                    _trim_commits(connection, job)
        self._states.clear()
        self._commits.clear()

    def _flush_if_possible(self) -> None:
        """What cannot be written now is read later."""
        with suppress(DiskFullError):
            self.flush()

    def states(self, job: JobId, most: int, *, before: int | None = None) -> list[StateRow]:
        """The newest states of a job, oldest first; only those with a number below `before`."""
        query = sa.select(JOB_STATES).where(JOB_STATES.c.job_id == job)
        if before is not None:
            query = query.where(JOB_STATES.c.number < before)
        query = query.order_by(JOB_STATES.c.number.desc()).limit(most)
        self._flush_if_possible()
        with self._database.transaction() as connection:
            found = connection.execute(query).all()
        return [_state_of(row) for row in reversed(found)]

    def commits(self, job: JobId, most: int, *, before: int | None = None) -> list[CommitRow]:
        """Those of a job with the highest steps, lowest first; only steps below `before`."""
        query = sa.select(COMMITS).where(COMMITS.c.job_id == job)
        if before is not None:
            query = query.where(COMMITS.c.step < before)
        query = query.order_by(COMMITS.c.step.desc()).limit(most)
        self._flush_if_possible()
        with self._database.transaction() as connection:
            found = connection.execute(query).all()
        return [_commit_of(row) for row in reversed(found)]

    def jobs(self) -> list[JobId]:
        """Jobs that have something here."""
        return list(self._last)

    def forget(self, job: JobId) -> None:
        """Delete all that is here of a job."""
        self._states = [row for row in self._states if row.job != job]
        self._commits = [row for row in self._commits if row.job != job]
        with self._database.write() as connection:
            for table in (JOB_STATES, COMMITS):
                connection.execute(sa.delete(table).where(table.c.job_id == job))
        self._last.pop(job, None)

    def _note(self, job: JobRecord) -> None:
        last = self._last.get(job.job_id)
        if last is not None and (last.state, last.attempt) == (job.state, job.attempt):
            return
        row = StateRow(
            job=job.job_id,
            number=1 if last is None else last.number + 1,
            at_s=job.since_s,
            attempt=job.attempt,
            state=job.state,
            reason=job.reason,
        )
        self._last[job.job_id] = row
        self._states.append(row)


def _values(row: StateRow | CommitRow) -> dict[str, object]:
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    return {"job_id": values.pop("job"), **values}


def _state_of(row: sa.Row[tuple[object, ...]]) -> StateRow:
    values = dict(row._mapping)
    return StateRow(job=JobId(values.pop("job_id")), **values)


def _commit_of(row: sa.Row[tuple[object, ...]]) -> CommitRow:
    values = dict(row._mapping)
    return CommitRow(job=JobId(values.pop("job_id")), **values)


def _trim_states(connection: sa.Connection, newest: StateRow) -> None:
    """Drop what is more than is kept of a job."""
    if newest.number > MAX_STATES:
        is_old = JOB_STATES.c.number <= newest.number - MAX_STATES
        connection.execute(sa.delete(JOB_STATES).where(JOB_STATES.c.job_id == newest.job, is_old))


def _trim_commits(connection: sa.Connection, job: JobId) -> None:
    """Drop what is more than is kept of a job."""
    newest = sa.select(COMMITS.c.step).where(COMMITS.c.job_id == job)
    newest = newest.order_by(COMMITS.c.step.desc())
    oldest = newest.offset(MAX_COMMITS).limit(1).scalar_subquery()
    connection.execute(sa.delete(COMMITS).where(COMMITS.c.job_id == job, COMMITS.c.step <= oldest))
