"""Runs of diagnostics that are kept, and what exchanges between nodes are worth when healthy.

Results decide nothing after their run, so losing the newest in a crash costs a
look at the past; a run whose controller ended is marked as interrupted.
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from google.protobuf import json_format

from controller.store.database import Database
from controller.store.tables import DIAGNOSES, DIAGNOSIS_FINDINGS, FLEET_BASELINES
from diagnostics.core.baseline import Baseline
from outlast.v1 import diagnostics_pb2

RUNNING, DONE, INTERRUPTED = "running", "done", "interrupted"
# Two a day for a quarter of a year.
MAX_KEPT = 200
_BASELINE_KEY = "exchanges"


class Diagnoses:
    """The runs in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def recover(self) -> None:
        """Mark the runs of an earlier controller that never ended."""
        for run in self.list():
            if run.state == RUNNING:
                run.state = INTERRUPTED
                self.put(run)

    def put(self, run: diagnostics_pb2.DiagnosticRun) -> None:
        """Keep a run as it is now; the oldest beyond `MAX_KEPT` are dropped."""
        summary = diagnostics_pb2.DiagnosticRun()
        summary.CopyFrom(run)
        del summary.findings[:]
        row = {
            "run_id": run.run_id,
            "started_s": run.started_s,
            "document": json_format.MessageToJson(summary, indent=None),
        }
        findings = diagnostics_pb2.DiagnosticRun(findings=run.findings).SerializeToString()
        newest = sa.select(DIAGNOSES.c.run_id).order_by(DIAGNOSES.c.started_s.desc())
        with self._database.write() as connection:
            for table in (DIAGNOSES, DIAGNOSIS_FINDINGS):
                connection.execute(sa.delete(table).where(table.c.run_id == run.run_id))
            connection.execute(sa.insert(DIAGNOSES), row)
            connection.execute(
                sa.insert(DIAGNOSIS_FINDINGS), {"run_id": run.run_id, "run": findings}
            )
            for table in (DIAGNOSIS_FINDINGS, DIAGNOSES):
                connection.execute(
                    sa.delete(table).where(table.c.run_id.not_in(newest.limit(MAX_KEPT)))
                )

    def get(self, run_id: str) -> diagnostics_pb2.DiagnosticRun | None:
        """A run with all its findings."""
        query = sa.select(DIAGNOSES.c.document, DIAGNOSIS_FINDINGS.c.run).join(
            DIAGNOSIS_FINDINGS, DIAGNOSIS_FINDINGS.c.run_id == DIAGNOSES.c.run_id
        )
        with self._database.transaction() as connection:
            row = connection.execute(query.where(DIAGNOSES.c.run_id == run_id)).first()
        if row is None:
            return None
        run = parse(row.document)
        run.MergeFromString(row.run)
        return run

    def list(self) -> list[diagnostics_pb2.DiagnosticRun]:
        """The runs that are kept, newest first and without their findings."""
        query = sa.select(DIAGNOSES.c.document).order_by(DIAGNOSES.c.started_s.desc())
        with self._database.transaction() as connection:
            return [parse(row.document) for row in connection.execute(query)]

    def documents(self, node: str = "") -> dict[str, str]:
        """What `parse` makes runs of, by their id, newest first; only of those with a node.

        Of a large fleet a run takes tens of milliseconds to parse, and most are not wanted.
        """
        query = sa.select(DIAGNOSES.c.run_id, DIAGNOSES.c.document)
        if node:
            query = query.where(DIAGNOSES.c.document.contains(json.dumps(node), autoescape=True))
        with self._database.transaction() as connection:
            rows = connection.execute(query.order_by(DIAGNOSES.c.started_s.desc()))
            return {row.run_id: row.document for row in rows}

    def load_baseline(self) -> Baseline:
        """What exchanges were worth in earlier healthy runs."""
        query = sa.select(FLEET_BASELINES.c.document).where(FLEET_BASELINES.c.key == _BASELINE_KEY)
        with self._database.transaction() as connection:
            document = connection.execute(query).scalar()
        return Baseline() if document is None else Baseline.from_json(document)

    def save_baseline(self, baseline: Baseline) -> None:
        """Replace what `load_baseline` gives."""
        row = {"key": _BASELINE_KEY, "document": baseline.to_json()}
        with self._database.write() as connection:
            connection.execute(
                sa.delete(FLEET_BASELINES).where(FLEET_BASELINES.c.key == _BASELINE_KEY)
            )
            connection.execute(sa.insert(FLEET_BASELINES), row)


def parse(document: str) -> diagnostics_pb2.DiagnosticRun:
    """A run without its findings, as `documents` has it."""
    # A newer controller may have written more than this one knows.
    return json_format.Parse(document, diagnostics_pb2.DiagnosticRun(), ignore_unknown_fields=True)
