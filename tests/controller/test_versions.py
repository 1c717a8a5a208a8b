"""Journals and archives of other versions: older ones are read, newer ones refused by name."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.storage.storage import Storage
from controller import archive
from controller.agent.workers.launch import read_spec
from controller.core.changes import JobPut, fold
from controller.core.codec import decode_change
from controller.store import database as database_module
from controller.store.backend import DatabaseError
from controller.store.database import Database
from controller.store.journal import UnreadableJournalError
from outlast.client import Client
from outlast.spec.models import ZeroSpec
from tests.controller.processes import controller
from tests.controller.test_journal import opened

OLDER_JOURNALS = Path(__file__).parent / "core" / "journals"


def test_journal_of_a_newer_version_is_refused_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(database_module, "SCHEMA_VERSION", 3)
        Database(tmp_path / "j").close()
    for _ in range(2):
        with pytest.raises(DatabaseError, match=r"version 3 .*reads versions 1 to 2\); start that"):
            Database(tmp_path / "j")


@pytest.mark.parametrize("name", ["whole_jobs", "whole_orders"])
def test_journal_of_an_older_version_is_read_and_is_of_this_one_then(
    tmp_path: Path, name: str
) -> None:
    lines = (OLDER_JOURNALS / f"{name}.jsonl").read_text().splitlines()
    _write_rows(tmp_path / "j", lines, schema_version=1)
    with opened(tmp_path / "j") as journal:
        state = journal.load()
        assert state == fold(decode_change(json.loads(line)) for line in lines)
        job = next(iter(state.jobs.values()))
        journal.take_over()
        assert _version(tmp_path / "j") == 1, "the version that wrote it could not go on with it"
        journal.append([JobPut(job=replace(job, reason="after"), before=job)])
        assert journal.load().jobs[job.job_id].reason == "after"
    assert _version(tmp_path / "j") == 2


def test_a_job_that_0_1_0_left_running_goes_on_under_this_controller(tmp_path: Path) -> None:
    rows = (OLDER_JOURNALS / "left_by_0_1_0.jsonl").read_text().splitlines()
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    _write_rows(state_dir / "journal.sqlite", rows, schema_version=1)
    with controller(state_dir) as process, Client(process.grpc) as client:
        assert [(job.job_id, job.state) for job in client.list()] == [("tiny-00000", "RUNNING")]
        assert {node.node_id: node.state for node in client.nodes()} == {
            "n1": "ASSIGNED",
            "n2": "ASSIGNED",
        }


def test_agents_take_the_spec_that_a_controller_of_0_1_0_orders() -> None:
    *_, row = (OLDER_JOURNALS / "left_by_0_1_0.jsonl").read_text().splitlines()
    spec_json = json.loads(row)["job"]["spec_json"]
    assert json.loads(spec_json)["parallel"]["zero"] == 0
    spec = read_spec(spec_json)
    assert (spec.name, spec.steps, spec.parallel.zero) == ("tiny", 40000, ZeroSpec(level=0))


def test_a_row_that_is_not_known_is_named_and_nothing_is_guessed(tmp_path: Path) -> None:
    text = json.dumps({"is": "RecordChanged", "node": "n1", "values": {"mood": "good"}})
    _write_rows(tmp_path / "j", [text], schema_version=2)
    with (
        opened(tmp_path / "j") as journal,
        pytest.raises(UnreadableJournalError, match=r"row 1 cannot be read: NodeRecord\.mood"),
    ):
        journal.load()


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    for text in ('{"is": "JobPu', '{"is": "IncidentCut"}', "{}"):
        path = tmp_path / f"{len(text)}"
        _write_rows(path, [text], schema_version=2)
        with (
            opened(path) as journal,
            pytest.raises(UnreadableJournalError, match="row 1 cannot be read"),
        ):
            journal.load()


def _version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        (found,) = database.execute("SELECT schema_version FROM controller").fetchone()
    assert isinstance(found, int)
    return found


def _write_rows(path: Path, rows: list[str], *, schema_version: int) -> None:
    """A journal as a version of this number wrote it."""
    Database(path).close()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE controller SET schema_version = ?", (schema_version,))
        database.executemany(
            "INSERT INTO facts (term, at_s, fact) VALUES (1, 0.0, ?)", [(row,) for row in rows]
        )


def _older_job() -> dict[str, object]:
    """The line of a job, and how it was written."""
    lines = (OLDER_JOURNALS / "whole_jobs.jsonl").read_text().splitlines()
    found: dict[str, object] = next(
        line for line in map(json.loads, lines) if line["is"] == "JobPut"
    )
    return found


def _archive(folder: Path, *, version: int) -> Storage:
    summary = {
        "version": version,
        "job_id": "j",
        "name": "j",
        "state": "FAILED",
        "reason": "",
        "submitted_s": 1.0,
        "finished_s": 2.0,
        "step": 3,
        "attempts": 1,
        "incidents": 0,
        "archived_s": 4.0,
    }
    job = _older_job()
    job["job"]["plan"]["replica_places"] = [[1], [0]]  # type: ignore[index]
    lines = (json.dumps(each) for each in ({"summary": summary}, {"job": job}))
    (folder / archive.job_path("j")).write_bytes(gzip.compress("\n".join(lines).encode()))
    return Storage(folder.as_uri())


def test_an_older_archive_is_shown_as_one_of_this_version(tmp_path: Path) -> None:
    storage = _archive(tmp_path, version=1)
    assert [each.job_id for each in archive.summaries(storage)] == ["j"]
    found = archive.read(storage, "j")
    assert found.job["plan"]["replica_node_indexes"] == {"runs": [[1, 1], [1, -1]]}


def test_a_newer_archive_is_refused_with_its_version(tmp_path: Path) -> None:
    storage = _archive(tmp_path, version=archive.VERSION + 1)
    for read in (lambda: archive.summaries(storage), lambda: archive.read(storage, "j")):
        with pytest.raises(
            archive.ArchiveError, match=r"version 3 of the file; .* versions 1 to 2"
        ):
            read()
