"""A controller that runs jobs for ever keeps what `retention` says, and archives the rest first."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench import bare_controller
from bench.bare_controller import Bench
from checkpoint.storage import drivers
from checkpoint.storage.storage import Storage
from controller import archive, config_file, retention
from controller.convert import plan_of
from controller.core import events as ev
from controller.core.changes import IncidentPut, NodePut, State
from controller.core.incident_record import IncidentRecord, TimelineEntry
from controller.core.node_events import NodeForgetRequested, NodeFound, WorkerExited
from controller.core.retention import MAX_AT_ONCE, Expired, Retention, expired
from controller.core.states import IncidentState, JobState, NodeState
from controller.counters import Counters
from controller.diagnosis.runs import DiagnosticRuns
from controller.retention import Keeper
from controller.sessions.agents import AgentsService
from controller.sessions.incoming import Incoming
from controller.sessions.logs import LogQueries
from controller.sessions.session import Sessions, StaleIncarnationError
from controller.store.curves import StepRow
from controller.store.database import Database
from controller.store.diagnoses import Diagnoses
from controller.store.journal import Journal
from outlast.cli.errors import ExitCode
from outlast.clock import SystemClock
from outlast.errors import RetryableError
from outlast.failures import ErrorKind, FailureClass
from outlast.ids import Attempt, CommandId, IncidentId, JobId, NodeId
from outlast.spec.parse import parse_spec
from outlast.v1 import agents_pb2
from tests.cli.running import outlast, outlast_json
from tests.controller.fakes import spec_document

NODES = (NodeId("n0"), NodeId("n1"))
KEPT = 20


@asynccontextmanager
async def _controller(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """The production service and journal; snapshots come after a few jobs instead of thousands."""
    small = partial(Journal, snapshot_least_bytes=50_000)
    monkeypatch.setattr(bare_controller, "Journal", small)
    async with bare_controller.controller(folder) as bench:
        for node in NODES:
            hello = agents_pb2.Hello(
                node_id=node,
                incarnation="one",
                address="127.0.0.1",
                rendezvous_port=29500,
                workers=1,
            )
            now_s = asyncio.get_running_loop().time()
            message = agents_pb2.AgentMessage(hello=hello)
            await bench.service.tell(*bench.edge.handle(node, message, now_s))
        yield bench


async def _answer(bench: Bench) -> None:
    """Every node does at once what it is told."""
    while bench.commands:
        told, bench.commands[:] = bench.commands[:], []
        await bench.service.tell(
            *(
                ev.CommandFinished(
                    command_id=CommandId(command_id),
                    node=node,
                    ok=True,
                    verdict="pass" if kind == "run_suite" else "",
                    detail="",
                    error_kind=ErrorKind.NONE,
                    completed_step=-1,
                )
                for node, command_id, kind in told
            )
        )


def _exited(job: JobId, rank: int, attempt: int, *, code: int = 0) -> WorkerExited:
    return WorkerExited(
        job_id=job,
        attempt=Attempt(attempt),
        node=NODES[rank],
        rank=rank,
        code=code,
        fault_class=FailureClass.KILLED_BY_SIGNAL if code else FailureClass.NONE,
        fingerprint="",
        detail="killed by SIGKILL" if code else "done",
        traceback="",
        completed_step=2 if code else 10,
        at_s=time.time(),
    )


async def _advance(bench: Bench, job: JobId, attempt: int, step: int) -> None:
    row = StepRow(
        job=job,
        step=step,
        attempt=attempt,
        loss=2.5,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=64,
        duration_s=0.1,
        at_s=time.time(),
    )
    bench.service.offer([], [row])
    await bench.service.tell(
        ev.JobAdvanced(
            job_id=job,
            attempt=Attempt(attempt),
            completed_step=step,
            resumed_step=0,
            at_s=time.time(),
        )
    )


async def _run_job(bench: Bench, number: int) -> JobId:
    """A short job that loses a rank once."""
    job = JobId(f"short-{number}")
    # Its name is free again when it has ended.
    spec = parse_spec(spec_document(name="short"))
    await bench.service.tell(
        ev.JobSubmitted(
            job_id=job,
            name=spec.name,
            request_id=job,
            spec_json=spec.canonical_json(),
            checkpoint_url="",
            plan=plan_of(spec),
        )
    )
    await _answer(bench)
    await _advance(bench, job, 1, 2)
    await bench.service.tell(_exited(job, number % 2, 1, code=-9))
    await _answer(bench)
    if bench.service.state.jobs[job].state is JobState.DIAGNOSING:
        await _passed(bench, job)
    attempt = bench.service.state.jobs[job].attempt
    await _advance(bench, job, attempt, 3)
    await bench.service.tell(
        ev.CheckpointCommitted(job_id=job, step=10, attempt=attempt, saved_by=attempt)
    )
    await bench.service.tell(*(_exited(job, rank, attempt) for rank in range(2)))
    await _answer(bench)
    ended = bench.service.state.jobs[job]
    assert (ended.state, ended.held_by) == (JobState.SUCCEEDED, ()), ended.reason
    return job


async def _passed(bench: Bench, job: JobId) -> None:
    """The search for what is at fault finds nothing."""
    incident = bench.service.state.jobs[job].incident
    assert incident is not None
    search = bench.service.state.incidents[incident].search
    nodes = tuple(NodeFound(node=node, verdict="pass", detail="", figure=None) for node in NODES)
    await bench.service.tell(ev.FaultsSearched(search=search, job_id=job, nodes=nodes, links=()))
    await _answer(bench)


def _sizes(bench: Bench, folder: Path) -> dict[str, int]:
    """What might grow with the number of jobs."""
    state = bench.service.state
    with sqlite3.connect(folder / "journal.sqlite") as database:
        tables = [
            name
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        # How many changes there are depends on when the last snapshot was.
        rows = {
            f"rows of {name}": database.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in tables
            if name not in ("changes", "sqlite_sequence")
        }
    database.close()
    return {
        **rows,
        "jobs": len(state.jobs),
        "incidents": len(state.incidents),
        "attempts": len(state.attempts),
        "ranks done": len(state.done),
        "commands": len(state.commands),
        "indexed": sum(map(len, (state.index.of_job, state.index.num_held, state.index.live_jobs))),
        "files": sum(1 for path in folder.rglob("*") if "archive" not in path.parts),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def test_after_200_jobs_nothing_has_grown_since_100(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue: files, rows, memory and descriptors at 100 and at 200 jobs."""
    url = (tmp_path / "archive").as_uri()
    found: list[dict[str, int]] = []
    objects: list[int] = []
    journal_bytes: list[int] = []

    async def scenario() -> None:
        async with _controller(tmp_path, monkeypatch) as bench:
            keeper = Keeper(bench.service, Retention(ended_jobs=KEPT, archive_url=url))
            for number in range(200):
                await _run_job(bench, number)
                await keeper.look()
                if number in (99, 199):
                    gc.collect()
                    found.append(_sizes(bench, tmp_path))
                    objects.append(len(gc.get_objects()))
                    journal_bytes.append(bench.journal.num_bytes)
            assert bench.snapshots > 5

    asyncio.run(scenario())
    at_100, at_200 = found
    # What other tests have left open may be closed meanwhile.
    assert {what: at_200[what] for what in at_200 if at_200[what] > at_100[what]} == {}
    assert at_200["jobs"] == at_200["rows of tokens"] == KEPT
    # A job that stayed would be hundreds of objects.
    assert objects[1] - objects[0] < 100 * 10
    # A snapshot of what is kept, and as much again in changes at most.
    assert max(journal_bytes) < 1_000_000
    names = [each.job_id for each in archive.summaries(Storage(url))]
    assert sorted(names) == sorted(f"short-{number}" for number in range(200 - KEPT))


def test_archived_jobs_are_listed_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (tmp_path / "archive").as_uri()

    async def scenario() -> None:
        async with _controller(tmp_path, monkeypatch) as bench:
            keeper = Keeper(bench.service, Retention(ended_jobs=1, archive_url=url))
            for number in range(3):
                await _run_job(bench, number)
            assert await keeper.look() == 2
            assert list(bench.service.state.jobs) == ["short-2"]
            assert bench.service.curves.read(JobId("short-0")) == []

    asyncio.run(scenario())
    listed = outlast("archive", "list", url)
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [
        ["short-0", "SUCCEEDED"],
        ["short-1", "SUCCEEDED"],
    ]
    shown = outlast("archive", "show", url, "short-0")
    assert "worker_killed, restart_in_place" in shown.stdout
    document = outlast_json("archive", "show", url, "short-0")
    assert [step["step"] for step in document["steps"]] == [2, 3]
    assert document["job"]["spec_json"]
    unknown = outlast("archive", "show", url, "short-9")
    assert unknown.returncode == ExitCode.BAD_INPUT
    assert "`outlast archive list" in unknown.stderr
    (tmp_path / "archive" / "short-0.json.gz").write_bytes(b"no archive")
    damaged = outlast("archive", "list", url)
    assert (damaged.returncode, damaged.stdout) == (ExitCode.BAD_INPUT, "")
    assert "short-0.json.gz is not the file of an archived job" in damaged.stderr


def test_what_cannot_be_archived_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(url: str) -> Storage:
        raise RetryableError(f"{url}: no such store")

    async def scenario() -> None:
        async with _controller(tmp_path, monkeypatch) as bench:
            limits = Retention(ended_jobs=1, archive_url="file:///archive")
            for number in range(2):
                await _run_job(bench, number)
            assert await Keeper(bench.service, limits, open_storage=refuse).look() == 0
            assert len(bench.service.state.jobs) == 2
            assert len(bench.service.curves.read(JobId("short-0"))) == 2
            without = Retention(ended_jobs=1)
            assert await Keeper(bench.service, without).look() == 1
            assert list(bench.service.state.jobs) == ["short-1"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("retention: {ended_job: 3}", "retention.ended_job is not known.*perhaps .*ended_jobs"),
        ("retentions: {}", "retentions is not known; allowed: code, notify, queue, retention"),
        ("queue: {owner: {}}", "queue.owner is not known; allowed: reserve_after_s"),
        ("queue: {owners: {alice: many}}", "queue.owners.alice is 'many'; allowed: a number of n"),
        ("queue: {nodes_per_owner: -1}", "queue.nodes_per_owner is -1; allowed: a number of nodes"),
        ("queue: {most_priority: high}", "queue.most_priority is 'high'; allowed: a whole n"),
        ("queue: {reserve_after_s: .inf}", "queue.reserve_after_s is inf; allowed: seconds"),
        ("retention: {ended_jobs: 0}", "retention.ended_jobs is 0; allowed: 1 or more"),
        ("retention: {ended_jobs: 1.5}", "retention.ended_jobs is 1.5; allowed: a whole number"),
        ("retention: {ended_jobs: true}", "retention.ended_jobs is True; allowed: a whole number"),
        ("retention: {ended_jobs_days: -1}", "retention.ended_jobs_days is -1; allowed: more"),
        ("retention: {ended_jobs_days: .nan}", "retention.ended_jobs_days is nan; allowed: more"),
        ("retention: {archive_url: s4://x}", "retention.archive_url is .*no store 's4'"),
        ("retention: {archive_url: ended}", "retention.archive_url is .*a relative path; allowed"),
        ("retention: {archive_url: 3}", "retention.archive_url is 3; allowed: text"),
        ("retention: [1]", "retention is .1.; allowed: fields with values"),
        ("a: b: c", "is not YAML"),
    ],
)
def test_mistakes_in_the_configuration_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "controller.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        config_file.read(path)


def test_quotas_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "controller.yaml"
    path.write_text("queue: {nodes_per_owner: 4, owners: {alice: 16, ci: 0}, reserve_after_s: 60}")
    found = config_file.read(path).settings
    assert found.reserve_after_s == 60.0
    assert [found.quota_of(owner) for owner in ("alice", "ci", "kim", "")] == [16, 0, 4, None]


def test_configuration_has_defaults(tmp_path: Path) -> None:
    path = tmp_path / "controller.yaml"
    path.write_text("")
    assert config_file.read(path).retention == Retention()
    path.write_text("retention: {ended_jobs_days: 7, archive_url: /var/ended}")
    assert config_file.read(path).retention == Retention(
        ended_jobs_days=7, archive_url="/var/ended"
    )


def test_an_archive_whose_driver_is_missing_is_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "find_spec", lambda name: None)
    path = tmp_path / "controller.yaml"
    path.write_text("retention: {archive_url: s3://bucket/ended}")
    with pytest.raises(ValueError, match=r"archive_url: s3:// URLs need .* pip install s3fs"):
        config_file.read(path)


def test_a_mistake_in_one_look_is_counted_and_not_the_last_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def failing(*_: object, **__: object) -> Expired:
        looks.append("look")
        raise ValueError("a mistake of ours")

    async def run() -> None:
        async with _controller(tmp_path, monkeypatch) as bench:
            keeper = asyncio.create_task(Keeper(bench.service, Retention()).run())
            async with asyncio.timeout(30):
                while len(looks) < 2:
                    await asyncio.sleep(0.001)
            keeper.cancel()
            assert bench.service.guard.counts["retention"] >= 1

    monkeypatch.setattr(retention, "LOOK_PERIOD_S", 0.001)
    monkeypatch.setattr(retention, "expired", failing)
    asyncio.run(run())


def test_former_nodes_and_what_is_cut_of_an_incident_are_archived_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (tmp_path / "archive").as_uri()
    forgotten: list[NodeId] = []

    async def scenario() -> None:
        async with _controller(tmp_path, monkeypatch) as bench:
            job = await _run_job(bench, 0)
            (incident,) = bench.service.state.incidents_of(bench.service.state.jobs[job])
            line = TimelineEntry(phase="line", at_s=time.time())
            long = replace(incident, state=IncidentState.OPEN, timeline=(line,) * 300)
            away = [
                replace(node, state=NodeState.RELEASED, since_s=1.0)
                for node in bench.service.state.nodes.values()
            ]
            # One that is not there any more, and one whose agent still is.
            gone = replace(away[0], node=NodeId("gone/1"))
            for change in (IncidentPut(incident=long), *(NodePut(node=n) for n in (away[0], gone))):
                bench.service.state.apply(change)
                bench.journal.append([change])
            limits = Retention(incident_lines=200, archive_url=url)
            bench.service.on_forgotten = forgotten.append
            keeper = Keeper(bench.service, limits)
            assert await keeper.look() == 2
            state = bench.service.state
            assert gone.node not in state.nodes
            assert away[0].node in state.nodes
            assert len(state.incidents[incident.incident].timeline) == 200
            assert bench.journal.load() == state
            assert await keeper.look() == 0

    asyncio.run(scenario())
    assert forgotten == ["gone/1"]
    (node,) = (tmp_path / "archive" / "nodes").iterdir()
    assert node.name == "gone%2F1-1.json.gz"
    assert json.loads(gzip.decompress(node.read_bytes()))["node"]["node"]["node"] == "gone/1"
    (cut,) = (tmp_path / "archive" / "incidents").iterdir()
    document = json.loads(gzip.decompress(cut.read_bytes()))
    assert (document["version"], len(document["cut"]["timeline"])) == (archive.VERSION, 100)


def test_of_a_node_that_a_person_forgets_no_session_and_no_count_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with _controller(tmp_path, monkeypatch) as bench:
            sessions, counters = Sessions(), Counters()
            diagnoses = Diagnoses(Database(tmp_path / "diagnoses"))
            AgentsService(
                service=bench.service,
                sessions=sessions,
                edge=bench.edge,
                logs=LogQueries(bench.service, sessions, bench.edge),
                runs=DiagnosticRuns(sessions, diagnoses, SystemClock(), counters),
                counters=counters,
                incoming=Incoming(bench.service.state),
            )
            node = next(iter(bench.service.state.nodes.values()))
            gone = replace(node, node=NodeId("gone"), state=NodeState.RETIRED)
            bench.service.state.apply(NodePut(node=gone))
            bench.journal.append([NodePut(node=gone)])
            for incarnation in ("old", "new"):
                sessions.closed(sessions.open(gone.node, incarnation))
            counters.findings[gone.node, "compute", "fail"] += 1
            with pytest.raises(StaleIncarnationError):
                sessions.open(gone.node, "old")
            await bench.service.tell(NodeForgetRequested(node=gone.node))
            assert gone.node not in bench.service.state.nodes
            sessions.open(gone.node, "old")
            assert not counters.findings

    asyncio.run(scenario())


def test_an_incident_that_grows_slowly_is_cut_in_lots() -> None:
    """Each cut is a file of the archive."""
    lines = [float(number) for number in range(300)]
    limits = Retention(incident_lines=200)
    for surplus, cut in ((19, 0), (20, 20)):
        state = _with_incident(lines[: 200 + surplus])
        found = expired(state, limits, 86_400.0).cuts
        assert [each.lines for each in found] == ([cut] if cut else [])


def test_of_many_incidents_the_longest_are_cut_first() -> None:
    state = State()
    for number in range(50):
        _with_incident([float(line) for line in range(250 + number)], state, f"i{number}")
    found = expired(state, Retention(incident_lines=200), 86_400.0).cuts
    assert len(found) == MAX_AT_ONCE
    assert found[0].incident == "i49"
    assert [cut.lines for cut in found] == sorted((cut.lines for cut in found), reverse=True)


def _with_incident(times_s: list[float], state: State | None = None, name: str = "i") -> State:
    """A state with an open incident whose lines are of these times."""
    state = State() if state is None else state
    lines = tuple(TimelineEntry(phase="line", at_s=at_s) for at_s in times_s)
    incident = IncidentRecord(
        incident=IncidentId(name),
        job=JobId("j"),
        attempt=Attempt(1),
        state=IncidentState.OPEN,
        opened_s=0.0,
        fault_s=0.0,
        fault_step=0,
        timeline=lines,
    )
    state.apply(IncidentPut(incident=incident))
    return state
