"""Ended jobs in an archive: a folder or any store, one compressed file for each.

A file has a line of JSON for each thing: a summary first, then the job's record, its incidents and
its steps. The summary is read without the rest of the file. Records are written as the journal has
them and read as the journal is: those of older versions too, those of newer ones not.

What does not belong here: when a job is archived (`controller.retention`).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote

from checkpoint.storage.storage import Storage
from controller.core.changes import IncidentGrown, IncidentPut, JobPut, NodePut, StateChange
from controller.core.codec import decode_change, encode_change
from controller.core.incident_cut import IncidentCut, cut_findings, cut_lines, cut_signs
from controller.core.incident_record import IncidentRecord
from controller.core.records import JobRecord, NodeRecord
from controller.store.curves import StepRow
from outlast.facts import facts
from outlast.ids import IncidentId, JobId

# 2: tables of places are written in runs (`controller.core.packing`).
VERSION = 2
_SUFFIX = ".json.gz"
_INCIDENTS = "incidents"
_NODES = "nodes"
# The summary's line is a few hundred bytes.
_HEAD_BYTES = 16_384


class ArchiveError(ValueError):
    """A file of an archive is not what it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a list of archived jobs shows."""

    job_id: str
    name: str
    state: str
    reason: str
    submitted_s: float
    finished_s: float | None
    step: int
    attempts: int
    incidents: int
    archived_s: float


@dataclass(slots=True, kw_only=True)
class Archived:
    """All that is known of an archived job."""

    summary: Summary
    job: dict[str, Any] = field(default_factory=dict)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)


class JobFile:
    """A job's file that is being made: steps are added in pages."""

    def __init__(self, job: JobRecord, incidents: list[IncidentRecord], now_s: float) -> None:
        self._bytes = io.BytesIO()
        self._file = gzip.GzipFile(fileobj=self._bytes, mode="wb", mtime=0)
        summary = Summary(
            job_id=job.job_id,
            name=job.name,
            state=str(job.state),
            reason=job.reason,
            submitted_s=job.submitted_s,
            finished_s=job.finished_s,
            step=job.high_step,
            attempts=job.attempt,
            incidents=len(incidents),
            archived_s=now_s,
        )
        self._line("summary", {"version": VERSION, **asdict(summary)})
        # What agents and the page read first does not wait for the whole file.
        self._file.flush()
        self._line("job", encode_change(JobPut(job=job)))
        for incident in incidents:
            self._line("incident", encode_change(IncidentPut(incident=incident)))

    def add_steps(self, rows: list[StepRow]) -> None:
        for row in rows:
            values = asdict(row)
            del values["job"]
            values["split"] = None if row.split is None else facts(row.split)
            self._line("step", values)

    def finish(self) -> bytes:
        """The whole file."""
        self._file.close()
        return self._bytes.getvalue()

    def _line(self, kind: str, value: object) -> None:
        self._file.write(json.dumps({kind: value}).encode() + b"\n")


def job_path(job_id: JobId | str) -> str:
    return f"{job_id}{_SUFFIX}"


def incident_path(incident: IncidentId) -> str:
    return f"{_INCIDENTS}/{incident}{_SUFFIX}"


def incident_file(incident: IncidentRecord) -> bytes:
    """The file of an incident whose job goes on."""
    return _one_line("incident", IncidentPut(incident=incident))


def cut_file(incident: IncidentRecord, cut: IncidentCut) -> tuple[str, bytes]:
    """Path and file of what is cut from an incident that goes on."""
    data = _one_line(
        "cut",
        IncidentGrown(
            incident=incident.incident,
            fault_s=incident.fault_s,
            timeline=cut_lines(incident, cut),
            evidence=cut_signs(incident, cut),
            findings=cut_findings(incident, cut),
        ),
    )
    # An incident is cut often. The same once more, after a crash, is the same file.
    digest = hashlib.sha256(data).hexdigest()[:12]
    return f"{_INCIDENTS}/{incident.incident}.cut-{digest}{_SUFFIX}", data


def node_file(node: NodeRecord) -> tuple[str, bytes]:
    """Path and file of a node that is on no list any more."""
    # Its name is its own choice.
    name = quote(node.node, safe="")
    return f"{_NODES}/{name}-{node.since_s:.0f}{_SUFFIX}", _one_line("node", NodePut(node=node))


def _one_line(kind: str, change: StateChange) -> bytes:
    line = json.dumps({"version": VERSION, kind: encode_change(change)})
    return gzip.compress(line.encode() + b"\n", mtime=0)


def summaries(storage: Storage) -> list[Summary]:
    """The archived jobs, those first that ended first.

    Raises:
        ArchiveError: a file is no job's.
    """
    names = [e.name for e in storage.entries("") if e.name.endswith(_SUFFIX)]
    found = [_summary(storage.read_range(name, 0, _HEAD_BYTES), name) for name in names]
    return sorted(found, key=lambda each: (each.finished_s or each.submitted_s, each.job_id))


def read(storage: Storage, job_id: str) -> Archived:
    """An archived job.

    Raises:
        FileNotFoundError: it is not there.
        ArchiveError: its file is damaged, or of a newer version.
    """
    path = job_path(job_id)
    data = storage.read_bytes(path)
    found = Archived(summary=_summary(data, path))
    try:
        for line in _lines(data):
            if "job" in line:
                found.job = _of_now(line["job"])["job"]
            elif "incident" in line:
                found.incidents.append(_of_now(line["incident"])["incident"])
            elif "step" in line:
                found.steps.append(line["step"])
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ArchiveError(f"{path} is damaged: {error}") from error
    return found


def _of_now(data: Any) -> Any:
    """A record as this version writes it, whichever wrote it."""
    return encode_change(decode_change(data))


def _lines(data: bytes) -> Iterator[dict[str, Any]]:
    for line in gzip.decompress(data).splitlines():
        yield json.loads(line)


def _summary(head: bytes, path: str) -> Summary:
    """The first line of a file of which this is the beginning."""
    try:
        text = zlib.decompressobj(wbits=31).decompress(head, 4 * _HEAD_BYTES)
        values = json.loads(text.split(b"\n")[0])["summary"]
        version = values["version"]
        if version > VERSION:
            raise ArchiveError(
                f"{path} was written by a newer version of Outlast (version {version} of the file; "
                f"this one reads versions 1 to {VERSION}); read it with that version"
            )
        names = Summary.__dataclass_fields__
        return Summary(**{name: values[name] for name in names})
    except ArchiveError:
        raise
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise ArchiveError(f"{path} is not the file of an archived job: {error}") from error
