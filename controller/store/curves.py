"""Loss curves: one row per job and step, from the last attempt that ran the step.

Not part of the journal: nothing is decided by these numbers. They are gathered
for a moment and written together; an agent keeps its reports until they are
written. Losses are float64 and come back bit for bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import sqlalchemy as sa

from controller.store.backend import DiskFullError
from controller.store.database import Database
from controller.store.tables import EVALUATIONS, STEPS, TOKENS
from outlast.ids import JobId
from outlast.v1 import common_pb2

# Over so many steps the speed of a job is averaged.
RATE_STEPS = 20
# What the database holds: many steps of as many tokens as a report may have come to more.
MAX_TOKENS = 2**63 - 1
# Rows read or deleted at once, 20 ms of the loop; a watcher that is far behind catches up in pages.
PAGE_ROWS = 1_000
_REAL_FIELDS = ("loss", "grad_norm", "learning_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of a job, as the attempt that ran it last reported it."""

    job: JobId
    step: int
    attempt: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    duration_s: float
    at_s: float
    eval_loss: float | None = None
    eval_losses: Mapping[str, float] = field(default_factory=dict)
    """Of held-out sets that have names."""
    split: common_pb2.StepSplit | None = None
    """Of this step and those before it back to the last that has one."""

    @property
    def is_left_out(self) -> bool:
        """Whether the step was passed without its batch."""
        return self.tokens == 0


@dataclass(slots=True)
class _Tail:
    """The newest steps of a job, kept at hand."""

    rows: deque[StepRow] = field(default_factory=lambda: deque(maxlen=RATE_STEPS))
    tokens: int = 0

    def take(self, row: StepRow) -> None:
        if self.rows and row.attempt < self.rows[-1].attempt:
            return
        if self.rows and row.attempt == self.rows[-1].attempt and row.step <= self.rows[-1].step:
            return  # sent again after a reconnection, or by another node as well
        if self.rows and row.attempt > self.rows[-1].attempt:
            # The pause between two attempts is no part of the speed.
            self.rows.clear()
        self.rows.append(row)
        self.tokens = min(self.tokens + row.tokens, MAX_TOKENS)


class Curves:
    """The step reports of every job."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._unwritten: list[StepRow] = []
        self._tails: dict[JobId, _Tail] = {}
        with database.transaction() as connection:
            newest = connection.execute(sa.select(sa.func.max(STEPS.c.version))).scalar()
        self._version: int = newest or 0

    def take(self, rows: Iterable[StepRow]) -> None:
        """Take reports in; `flush` makes them durable."""
        for row in rows:
            self._tail(row.job).take(row)
            self._unwritten.append(row)

    @property
    def num_unwritten(self) -> int:
        return len(self._unwritten)

    @property
    def version(self) -> int:
        """Of the row that was written last."""
        return self._version

    def flush(self) -> None:
        """Write what was taken in. A report of an older attempt never replaces a newer one."""
        if not self._unwritten:
            return
        values = []
        for row in self._unwritten:
            self._version += 1
            values.append(_to_values(row, self._version))
        statement = self._database.insert(STEPS)
        changed: dict[str, sa.ColumnElement[object]] = {
            column.name: statement.excluded[column.name]
            for column in STEPS.columns
            if column.name not in ("job_id", "step")
        }
        # The last steps before a fault are reported again, by nodes that know no parts of them.
        is_again = statement.excluded.attempt == STEPS.c.attempt
        known = sa.func.coalesce(statement.excluded.split, STEPS.c.split)
        changed["split"] = sa.case((is_again, known), else_=statement.excluded.split)
        statement = statement.on_conflict_do_update(
            index_elements=["job_id", "step"],
            set_=changed,
            where=statement.excluded.attempt >= STEPS.c.attempt,
        )
        totals = [
            {"job_id": job, "tokens": self._tail(job).tokens}
            for job in dict.fromkeys(row.job for row in self._unwritten)
        ]
        total = self._database.upsert(TOKENS)
        with self._database.write() as connection:
            connection.execute(statement, values)
            self._write_evaluations(connection)
            connection.execute(total, totals)
        self._unwritten.clear()

    def _write_evaluations(self, connection: sa.Connection) -> None:
        values = [
            {
                "job_id": row.job,
                "step": row.step,
                "name": name,
                "attempt": row.attempt,
                "loss": _without_nan(loss),
            }
            for row in self._unwritten
            for name, loss in row.eval_losses.items()
        ]
        if not values:
            return
        statement = self._database.insert(EVALUATIONS)
        statement = statement.on_conflict_do_update(
            index_elements=["job_id", "step", "name"],
            set_={name: statement.excluded[name] for name in ("attempt", "loss")},
            where=statement.excluded.attempt >= EVALUATIONS.c.attempt,
        )
        connection.execute(statement, values)

    def _flush_if_possible(self) -> None:
        """What cannot be written now is read later."""
        with suppress(DiskFullError):
            self.flush()

    def read(self, job: JobId, *, after_step: int = -1, most: int | None = None) -> list[StepRow]:
        """The curve of a job, by step: all of it, or a page."""
        self._flush_if_possible()
        query = (
            sa.select(STEPS)
            .where(STEPS.c.job_id == job, STEPS.c.step > after_step)
            .order_by(STEPS.c.step)
            .limit(most)
        )
        with self._database.transaction() as connection:
            return _from_rows(connection, job, connection.execute(query).all())

    def changed_since(
        self, job: JobId, version: int, *, after_step: int = -1
    ) -> tuple[list[StepRow], int]:
        """Rows written after `version`, oldest first, a page at most; and the version
        to ask with next time."""
        self._flush_if_possible()
        query = (
            sa.select(STEPS)
            .where(STEPS.c.job_id == job, STEPS.c.version > version, STEPS.c.step > after_step)
            .order_by(STEPS.c.version)
            .limit(PAGE_ROWS)
        )
        with self._database.transaction() as connection:
            rows = connection.execute(query).all()
            newest = rows[-1].version if rows else version
            return _from_rows(connection, job, rows), newest

    def jobs(self) -> list[JobId]:
        """Jobs that have rows here."""
        with self._database.transaction() as connection:
            return [JobId(job) for job in connection.execute(sa.select(TOKENS.c.job_id)).scalars()]

    def forget(self, job: JobId) -> bool:
        """Delete a page of a job's rows; whether that was the last of them."""
        page = (sa.select(STEPS.c.step).where(STEPS.c.job_id == job).order_by(STEPS.c.step)).limit(
            PAGE_ROWS
        )
        with self._database.write() as connection:
            gone = connection.execute(
                sa.delete(STEPS).where(STEPS.c.job_id == job, STEPS.c.step.in_(page))
            )
            if gone.rowcount == PAGE_ROWS:
                return False
            connection.execute(sa.delete(EVALUATIONS).where(EVALUATIONS.c.job_id == job))
            connection.execute(sa.delete(TOKENS).where(TOKENS.c.job_id == job))
        self._tails.pop(job, None)
        return True

    def last(self, job: JobId) -> StepRow | None:
        """The newest report of a job."""
        rows = self._tail(job).rows
        return rows[-1] if rows else None

    def num_tokens(self, job: JobId) -> int:
        """Tokens trained on, steps that were redone included."""
        return self._tail(job).tokens

    def tokens_per_s(self, job: JobId) -> float:
        """Speed over the last steps of the newest attempt; 0 before the first."""
        rows: Sequence[StepRow] = self._tail(job).rows
        span_s = _span_s(rows)
        return sum(row.tokens for row in rows) / span_s if span_s > 0 else 0.0

    def step_s(self, job: JobId) -> float | None:
        """From step to step over the last steps of the newest attempt, with what lies between them;
        None before the first."""
        rows: Sequence[StepRow] = self._tail(job).rows
        return _span_s(rows) / len(rows) if rows else None

    def _tail(self, job: JobId) -> _Tail:
        tail = self._tails.get(job)
        if tail is None:
            tail = self._tails[job] = self._load_tail(job)
        return tail

    def _load_tail(self, job: JobId) -> _Tail:
        query = (
            sa.select(STEPS)
            .where(STEPS.c.job_id == job)
            .order_by(STEPS.c.version.desc())
            .limit(RATE_STEPS)
        )
        total = sa.select(TOKENS.c.tokens).where(TOKENS.c.job_id == job)
        with self._database.transaction() as connection:
            rows = connection.execute(query).all()
            tokens = connection.execute(total).scalar()
        tail = _Tail()
        for row in reversed(rows):
            tail.take(_from_row(row))
        tail.tokens = tokens or 0
        return tail


def _span_s(rows: Sequence[StepRow]) -> float:
    return rows[-1].at_s - rows[0].at_s + rows[0].duration_s if rows else 0.0


def _to_values(row: StepRow, version: int) -> dict[str, object]:
    values: dict[str, object] = {
        name: getattr(row, name) for name in ("step", "attempt", "tokens", "duration_s", "at_s")
    }
    for name in _REAL_FIELDS:
        values[name] = _without_nan(getattr(row, name))
    values["eval_loss"] = None if row.eval_loss is None else _without_nan(row.eval_loss)
    values["evaluated"] = row.eval_loss is not None
    values["split"] = None if row.split is None else row.split.SerializeToString()
    values["job_id"] = row.job
    values["version"] = version
    return values


def _from_rows(
    connection: sa.Connection, job: JobId, rows: Sequence[sa.Row[tuple[object, ...]]]
) -> list[StepRow]:
    """Rows with the losses of their held-out sets."""
    found = [_from_row(row) for row in rows]
    evaluated = [row.step for row in found if row.eval_loss is not None]
    if not evaluated:
        return found
    query = (
        sa.select(EVALUATIONS)
        .where(
            EVALUATIONS.c.job_id == job,
            EVALUATIONS.c.step.between(min(evaluated), max(evaluated)),
        )
        .order_by(EVALUATIONS.c.name)
    )
    named: dict[tuple[int, int], dict[str, float]] = {}
    for each in connection.execute(query):
        named.setdefault((each.step, each.attempt), {})[each.name] = _with_nan(each.loss)
    return [replace(row, eval_losses=named.get((row.step, row.attempt), {})) for row in found]


def _from_row(row: sa.Row[tuple[object, ...]]) -> StepRow:
    values = row._mapping
    eval_loss = _with_nan(values["eval_loss"]) if values["evaluated"] else None
    split = None if values["split"] is None else common_pb2.StepSplit.FromString(values["split"])
    return StepRow(
        job=JobId(values["job_id"]),
        step=values["step"],
        attempt=values["attempt"],
        tokens=values["tokens"],
        duration_s=values["duration_s"],
        at_s=values["at_s"],
        loss=_with_nan(values["loss"]),
        grad_norm=_with_nan(values["grad_norm"]),
        learning_rate=_with_nan(values["learning_rate"]),
        eval_loss=eval_loss,
        split=split,
    )


def _without_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def _with_nan(value: float | None) -> float:
    return math.nan if value is None else value
