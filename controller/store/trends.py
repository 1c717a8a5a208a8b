"""What is kept of weeks: each job's hours and each node's days. Bounded; no part of the journal.

Hours are made of the rows of `steps`, each row once: how far that went is written with them, so
a controller that takes over goes on where the last one was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from controller.store.database import Database
from controller.store.tables import HOURS, HOURS_READ, NODE_DAYS, STEPS
from diagnostics.core.history import Hour
from diagnostics.core.hours import ReadUntil, StepFigures
from diagnostics.core.node_days import NodeDay
from outlast.ids import JobId, NodeId

DAY_S = 86_400.0
# Longer than a training run is looked back upon; 2,160 rows of a job.
KEPT_S = 90 * DAY_S
# Rows read at once, some milliseconds of the controller's loop.
PAGE_ROWS = 2_000


class TrendStore:
    """The tables of hours and days."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read_until(self, job: JobId) -> ReadUntil:
        """How far the hours of a job are written."""
        query = sa.select(HOURS_READ).where(HOURS_READ.c.job_id == job)
        with self._database.transaction() as connection:
            row = connection.execute(query).first()
        return ReadUntil() if row is None else ReadUntil(version=row.version, until_s=row.until_s)

    def steps_since(self, job: JobId, version: int) -> list[StepFigures]:
        """A page of rows written after a version, in the order in which they were."""
        query = (
            _figures()
            .where(STEPS.c.job_id == job, STEPS.c.version > version)
            .order_by(STEPS.c.version)
            .limit(PAGE_ROWS)
        )
        return self._steps(query)

    def newest_steps(self, job: JobId, below: int, most: int) -> list[StepFigures]:
        """Up to `most` rows of versions below one, newest first, a page at most."""
        query = (
            _figures()
            .where(STEPS.c.job_id == job, STEPS.c.version < below)
            .order_by(STEPS.c.version.desc())
            .limit(min(most, PAGE_ROWS))
        )
        return self._steps(query)

    def _steps(self, query: sa.Select[tuple[object, ...]]) -> list[StepFigures]:
        with self._database.transaction() as connection:
            return [StepFigures(**row._mapping) for row in connection.execute(query)]

    def put_hours(self, job: JobId, hours: Iterable[Hour], until: ReadUntil) -> None:
        """Keep hours that are over, and drop those that are too old."""
        values = [{"job_id": job, **dataclasses.asdict(hour)} for hour in hours]
        read = {"job_id": job, **dataclasses.asdict(until)}
        with self._database.write() as connection:
            if values:
                connection.execute(self._database.upsert(HOURS), values)
            connection.execute(self._database.upsert(HOURS_READ), read)
            connection.execute(
                sa.delete(HOURS).where(
                    HOURS.c.job_id == job, HOURS.c.begun_s < until.until_s - KEPT_S
                )
            )

    def hours(self, job: JobId, since_s: float) -> list[Hour]:
        """The hours of a job that began then or later."""
        columns = [HOURS.c[field.name] for field in dataclasses.fields(Hour)]
        query = sa.select(*columns).where(HOURS.c.job_id == job, HOURS.c.begun_s >= since_s)
        with self._database.transaction() as connection:
            rows = connection.execute(query.order_by(HOURS.c.begun_s, HOURS.c.attempt))
            return [Hour(**row._mapping) for row in rows]

    def jobs(self) -> list[JobId]:
        """Jobs that have rows here."""
        with self._database.transaction() as connection:
            query = sa.select(HOURS_READ.c.job_id)
            return [JobId(job) for job in connection.execute(query).scalars()]

    def forget_job(self, job: JobId) -> None:
        """Drop the hours of a job that is gone."""
        with self._database.write() as connection:
            for table in (HOURS, HOURS_READ):
                connection.execute(sa.delete(table).where(table.c.job_id == job))

    def add_days(self, days: Mapping[NodeId, NodeDay], day: int) -> None:
        """Add to what is known of nodes on a day, and drop days that are too old."""
        values = [
            {"node_id": node, "day": day, **dataclasses.asdict(each)} for node, each in days.items()
        ]
        statement = self._database.insert(NODE_DAYS)
        sums = {
            field.name: NODE_DAYS.c[field.name] + statement.excluded[field.name]
            for field in dataclasses.fields(NodeDay)
        }
        statement = statement.on_conflict_do_update(index_elements=["node_id", "day"], set_=sums)
        with self._database.write() as connection:
            if values:
                connection.execute(statement, values)
            connection.execute(sa.delete(NODE_DAYS).where(NODE_DAYS.c.day < day - KEPT_S // DAY_S))

    def days(self, since_day: int) -> dict[NodeId, NodeDay]:
        """What each node was like since a day, added up."""
        columns = [NODE_DAYS.c[field.name] for field in dataclasses.fields(NodeDay)]
        # PostgreSQL's sum of whole numbers is a decimal.
        sums = [sa.cast(sa.func.sum(each), each.type).label(each.name) for each in columns]
        query = (
            sa.select(NODE_DAYS.c.node_id, *sums)
            .where(NODE_DAYS.c.day >= since_day)
            .group_by(NODE_DAYS.c.node_id)
        )
        with self._database.transaction() as connection:
            rows = [dict(row._mapping) for row in connection.execute(query)]
        return {NodeId(row.pop("node_id")): NodeDay(**row) for row in rows}

    def forget_node(self, node: NodeId) -> None:
        """Drop the days of a node that is on no list any more."""
        with self._database.write() as connection:
            connection.execute(sa.delete(NODE_DAYS).where(NODE_DAYS.c.node_id == node))


def _figures() -> sa.Select[tuple[object, ...]]:
    return sa.select(*(STEPS.c[field.name] for field in dataclasses.fields(StepFigures)))
