"""Controllers whose journal is in PostgreSQL, as processes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from outlast.client import Client, UnavailableError
from tests.cli.running import outlast
from tests.controller.fakes import FakeAgent, spec_document, until
from tests.controller.processes import Controller, controller, refusal, wait_for
from tests.postgres.server import PASSWORD, Server, needs_postgres

pytestmark = needs_postgres


def test_job_goes_on_under_another_controller_after_the_first_was_killed(
    tmp_path: Path, url: str
) -> None:
    """Another machine with another state directory: the journal is all that they share."""

    async def scenario() -> None:
        with controller(tmp_path / "first", "--journal", url) as first:
            address = first.grpc
            agents = [FakeAgent(f"n{number}", lambda: address) for number in range(2)]
            for agent in agents:
                agent.start()
            await until(lambda: all(agent.is_connected for agent in agents), "agents join")
            with Client(address) as client:
                job_id = client.submit(spec_document()).job_id
            await until(lambda: all(agent.running for agent in agents), "workers run")
            for agent in agents:
                await agent.progress(2)
            sent = await agents[0].report(1.5, 1.25)
            await until(lambda: agents[0].acked_seq >= sent, "the losses are taken in")
            await asyncio.to_thread(reach, address, job_id, "RUNNING")
            commands = [agent.kinds() for agent in agents]

            refused = refusal(tmp_path / "second", "--journal", url)
            assert "another controller uses this database" in refused
            first.kill()
        with controller(tmp_path / "second", "--journal", url) as second:
            address = second.grpc
            await until(
                lambda: all(agent.welcomes[-1].term == 2 for agent in agents), "agents come back"
            )
            for agent in agents:
                await agent.progress(3)
            with Client(address) as client:
                job, steps = client.get(job_id, with_steps=True)
            assert (job.state, job.attempt, job.restarts) == ("RUNNING", 1, 0)
            assert [report.loss for report in steps] == [1.5, 1.25]
            assert [agent.kinds() for agent in agents] == commands
            for rank, agent in enumerate(agents):
                await agent.exit(rank, 0, step=10)
            await agents[0].commit(job_id, 10)
            await asyncio.to_thread(reach, address, job_id, "SUCCEEDED")
            await asyncio.gather(*(agent.stop() for agent in agents))

    asyncio.run(scenario())


def reach(address: str, job_id: str, state: str) -> None:
    with Client(address) as client:
        wait_for(lambda: client.get(job_id)[0].state == state, f"{job_id} is {state}")


def test_controller_that_waits_takes_over_on_another_machine(tmp_path: Path, url: str) -> None:
    with controller(tmp_path / "first", "--journal", url) as first:
        second = Controller(tmp_path / "second", "--journal", url, "--wait")
        starting = threading.Thread(target=second.start)
        starting.start()
        try:
            wait_for(lambda: second.stderr.exists(), "it begins")
            wait_for(lambda: "controller waits: " in second.stderr.read_text(), "it to wait")
            with Client(first.grpc) as client:
                job_id = client.submit(spec_document()).job_id
            first.kill()
            starting.join()
            with Client(second.grpc) as client:
                assert [job.job_id for job in client.list()] == [job_id]
        finally:
            starting.join()
            second.stop()


def test_controller_ends_with_its_server_and_starts_again_with_it(
    tmp_path: Path, url: str, server: Server
) -> None:
    with controller(tmp_path / "state", "--journal", url) as it:
        with Client(it.grpc) as client:
            job_id = client.submit(spec_document()).job_id
        line = Path(f"/proc/{it.pid}/cmdline").read_bytes()
        assert b"--journal" in line
        server.stop()
        try:
            with Client(it.grpc) as client, pytest.raises(UnavailableError):
                client.submit(spec_document(name="other"))
            process = it.process
            assert process is not None
            assert process.wait(60) == 1
            it.kill()
            assert "start it again with the same --state-dir" in it.stderr.read_text()
            refused = refusal(tmp_path / "other", "--journal", url)
            assert "cannot be opened" in refused
        finally:
            server.start()
        it.start()
        with Client(it.grpc) as client:
            assert [job.job_id for job in client.list()] == [job_id]
        said = it.stderr.read_text() + refused + line.decode()
    assert PASSWORD not in said


def test_password_on_the_command_line_is_refused(tmp_path: Path, url: str) -> None:
    shown = url.replace("outlast@", f"outlast:{PASSWORD}@")
    done = outlast("controller", "--state-dir", str(tmp_path / "state"), "--journal", shown)
    assert done.returncode == 2
    assert "has a password in its URL" in done.stderr
    assert PASSWORD not in done.stderr
    assert not (tmp_path / "state").exists()


def test_no_journal_is_begun_beside_another(tmp_path: Path, url: str) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with controller(here):
        pass
    assert "has a journal of its own" in refusal(here, "--journal", url)
    with controller(there, "--journal", url):
        pass
    assert "is in a database: name it with --journal" in refusal(there)


def test_there_is_nothing_to_forget_in_another_journal(
    tmp_path: Path, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "--fresh forgets" in refusal(tmp_path / "state", "--journal", url, "--fresh")
