"""The controller as a process: refusals, SIGKILL and return, the client, HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
import yaml

from controller.core.changes import State
from controller.store.database import Database
from controller.store.journal import Journal
from outlast.client import Client, NotFoundError, RefusedError, UnavailableError
from outlast.clock import SystemClock
from outlast.problems import SpecError
from tests.controller.fakes import FakeAgent, spec_document, until
from tests.controller.processes import controller, refusal, wait_for


def test_second_controller_is_told_who_is_there(tmp_path: Path) -> None:
    with controller(tmp_path) as first:
        line = refusal(tmp_path)
        assert f"pid {first.pid}, {first.grpc}" in line
        assert str(tmp_path) in line


def test_controller_and_its_agents_log_json_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    agent_log = folder / "nodes" / "node-0" / "agent.log"
    with controller(folder, "--log-format", "json", "--local-nodes", "1") as it:
        wait_for(
            lambda: agent_log.exists() and "controller connected" in agent_log.read_text(),
            "the agent has joined",
        )
        log = it.stderr
    for path, node in ((log, None), (agent_log, "node-0")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, records))
        assert node is None or {record["node"] for record in records} == {node}
    opened = [json.loads(line) for line in log.read_text().splitlines() if "session opened" in line]
    assert [record["node"] for record in opened] == ["node-0"]


@pytest.mark.parametrize("option", ["--grpc", "--http"])
def test_port_taken_names_the_port_and_the_option(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refusal(tmp_path, option, address)
    assert address in line
    assert option in line
    assert "in use" in line


def test_state_dir_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refusal(tmp_path / "file" / "state")
    assert f"{tmp_path / 'file' / 'state'} cannot be written" in line
    assert "--state-dir" in line


def test_address_without_a_port_is_refused(tmp_path: Path) -> None:
    assert "host:port" in refusal(tmp_path, "--grpc", "localhost")


def test_killed_controller_comes_back_and_the_job_runs_on(tmp_path: Path) -> None:
    """SIGKILL and restart: the job neither stops nor restarts, and nothing that agents
    reported meanwhile is lost."""

    async def scenario() -> None:
        with controller(tmp_path) as it:
            address = it.grpc
            agents = [FakeAgent(f"n{number}", lambda: address) for number in range(2)]
            for agent in agents:
                agent.start()
            await until(lambda: all(agent.is_connected for agent in agents), "agents join")
            with Client(address) as client:
                job_id = client.submit(spec_document()).job_id
            await until(lambda: all(agent.running for agent in agents), "workers run")
            for agent in agents:
                await agent.progress(1)
            await _reach(address, job_id, "RUNNING")
            commands = [agent.kinds() for agent in agents]

            it.kill()
            await until(lambda: not any(agent.is_connected for agent in agents), "it is away")
            sent = await agents[0].report(1.5, 1.25)
            await asyncio.to_thread(it.start)
            address = it.grpc
            await until(lambda: all(agent.is_connected for agent in agents), "agents are back")
            await until(lambda: agents[0].acked_seq >= sent, "what was missed is taken in")
            for agent in agents:
                await agent.progress(3)
            with Client(state_dir=tmp_path) as client:
                job, steps = client.get(job_id, with_steps=True)
            assert (job.state, job.attempt, job.restarts) == ("RUNNING", 1, 0)
            assert [report.loss for report in steps] == [1.5, 1.25]
            assert [agent.kinds() for agent in agents] == commands
            assert agents[0].welcomes[-1].term == 2

            # And it goes on deciding: the rest of the job's life.
            for rank, agent in enumerate(agents):
                await agent.exit(rank, 0, step=10)
            await agents[0].commit(job_id, 10)
            await _reach(address, job_id, "SUCCEEDED")
            await asyncio.gather(*(agent.stop() for agent in agents))

    asyncio.run(scenario())


def test_deposed_controller_ends_with_a_message_and_writes_nothing(tmp_path: Path) -> None:
    with controller(tmp_path) as it:
        database = Database(tmp_path / "journal.sqlite")
        newer = Journal(database, SystemClock())
        newer.take_over()
        with Client(it.grpc) as client, pytest.raises(UnavailableError):
            client.submit(spec_document())
        process = it.process
        assert process is not None
        assert process.wait(60) == 1
        assert "term 2 has begun" in it.stderr.read_text().splitlines()[-1]
        assert newer.load() == State()
        database.close()
        it.kill()


def test_client_and_web(tmp_path: Path) -> None:
    with controller(tmp_path) as it, Client(state_dir=tmp_path) as client:
        with pytest.raises(SpecError) as caught:
            client.submit({"name": "x", "parallel": {"tp": 3}, "stepz": 1})
        fields = [problem.field for problem in caught.value.problems]
        # All at once: the misspelt name, and what three ranks do not divide.
        assert fields[0] == "stepz"
        assert "model.heads" in fields
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(spec_document(seed=2**62 + 1)))
        job = client.submit(file, request_id="r1")
        assert client.submit(file, request_id="r1").job_id == job.job_id
        assert job.spec["seed"] == str(2**62 + 1)
        assert "waiting for 2 more node(s)" in job.reason
        assert [found.job_id for found in client.list()] == [job.job_id]
        found, steps = client.get(job.job_id)
        # Time passes while it waits.
        for one in (job, found):
            one.ClearField("seconds")
        assert (found, steps) == (job, ())
        assert client.nodes() == ()
        assert client.incidents() == ()
        with pytest.raises(NotFoundError, match="nope"):
            client.get("nope")
        with pytest.raises(NotFoundError, match="nope"):
            next(client.watch("nope"))
        with pytest.raises(RefusedError, match="not paused") as refused:
            client.resume(job.job_id)
        assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.value.reason == "JOB_NOT_PAUSED"
        with pytest.raises(RefusedError, match="connected"):
            client.diagnose()
        assert next(client.watch(job.job_id)).job.state == "QUEUED"

        assert json.loads(fetch(it.http, "/healthz")) == {"ok": True, "term": 1}
        assert "<title>Outlast</title>" in fetch(it.http, "/")
        (listed,) = json.loads(fetch(it.http, "/api/v1/jobs"))["jobs"]
        assert (listed["job_id"], listed["state"]) == (job.job_id, "QUEUED")
        metrics = fetch(it.http, "/metrics")
        assert f'outlast_job_state{{job_id="{job.job_id}",state="QUEUED"}} 1.0' in metrics
        assert f'outlast_job_state{{job_id="{job.job_id}",state="RUNNING"}} 0.0' in metrics
        assert "outlast_controller_term 1.0" in metrics
        assert "outlast_journal_commit_seconds_count" in metrics
        assert [update.job.state for update in _watch_and_cancel(client, job.job_id)] == [
            "QUEUED",
            "CANCELLED",
        ]
        address = it.grpc
        it.stop()
        with pytest.raises(UnavailableError, match=str(tmp_path)):
            Client(state_dir=tmp_path)
        with pytest.raises(UnavailableError, match=address), Client(address) as late:
            late.list()


def _watch_and_cancel(client: Client, job_id: str) -> list[object]:
    updates = []
    for update in client.watch(job_id):
        if not updates:
            client.cancel(job_id)
        updates.append(update)
    return updates


def fetch(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
        text: str = response.read().decode()
    return text


async def _reach(address: str, job_id: str, state: str) -> None:
    def look() -> str:
        with Client(address) as client:
            return client.get(job_id)[0].state

    for _ in range(1_000):
        present = await asyncio.to_thread(look)
        if present == state:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{job_id} is {present}, not {state}")


def test_controller_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with controller(tmp_path) as it:
            status = Path(f"/proc/{it.pid}/status").read_text()
            ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
            assert int(ignored.split()[1], 16) & 1 << signal.SIGHUP - 1
            os.kill(it.pid, signal.SIGHUP)
            with Client(it.grpc) as client:
                assert client.list() == ()
            assert it.stop(signal.SIGTERM)[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)
