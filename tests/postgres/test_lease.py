"""A leader that does not renew its lease, and one that waits: on one PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from controller.core.lease import LEASE_S, STARTING_S
from controller.store.backend import DatabaseError, DatabaseTakenError
from controller.store.database import Database, DeposedError
from controller.store.lease import Lease
from controller.store.postgres import parse_url
from controller.store.tables import CONTROLLER
from outlast.client import Client
from outlast.ports import free_ports
from tests.controller.fakes import FakeAgent, spec_document, until
from tests.controller.probes import probe
from tests.controller.processes import Controller, controller, wait_for
from tests.postgres.server import PASSWORD, Server, is_claimed, needs_postgres

pytestmark = needs_postgres


def test_leader_that_is_deposed_by_one_that_waits_writes_nothing_more(url: str) -> None:
    first, second = Database(parse_url(url)), Database(parse_url(url))
    try:
        Lease(first).take()
        assert first.raise_term(0) == 1
        waiting = Lease(second)
        for now_s in range(int(STARTING_S)):
            waiting.end_if_over(now_s)
        with pytest.raises(DatabaseTakenError):
            second.claim()
        waiting.end_if_over(STARTING_S + 1)
        # The server ends the session when it comes to it.
        wait_for(lambda: is_taken(waiting), "the lock to be free")
        assert second.raise_term(1) == 2
        for _ in range(2):
            with pytest.raises(DatabaseError), first.write():
                pass
        with second.write() as connection:
            assert connection.execute(CONTROLLER.select()).one().term == 2
    finally:
        first.close()
        second.close()


def is_taken(lease: Lease) -> bool:
    try:
        lease.take()
    except DatabaseTakenError:
        return False
    return True


def test_leader_that_renews_stays(url: str) -> None:
    """Looks of a minute, and a renewal before each of them."""

    async def scenario() -> None:
        first, second = Database(parse_url(url)), Database(parse_url(url))
        try:
            lease, waiting = Lease(first), Lease(second)
            lease.take()
            first.raise_term(0)
            for now_s in range(4 * int(LEASE_S)):
                # It renews at once, and then after a pause.
                keeping = asyncio.create_task(lease.keep())
                await asyncio.sleep(0)
                keeping.cancel()
                waiting.end_if_over(now_s)
            with first.write():
                pass
            second.raise_term(1)
            with pytest.raises(DeposedError):
                await lease.keep()
        finally:
            first.close()
            second.close()

    asyncio.run(scenario())


def test_leader_that_has_just_claimed_it_is_not_ended_for_the_lease_before(url: str) -> None:
    """That of another one that waited, or of a leader of an older version, which renews none."""
    first, second, third = (Database(parse_url(url)) for _ in range(3))
    try:
        Lease(first).take()
        waiting = Lease(third)
        waiting.end_if_over(0.0)
        first.close()
        wait_for(lambda: is_claimed(second), "the lock to be free")
        for now_s in range(int(STARTING_S) + 10):
            waiting.end_if_over(now_s)
        assert is_claimed(second)
    finally:
        for each in (first, second, third):
            each.close()


def test_controller_goes_on_waiting_while_the_server_is_away(
    tmp_path: Path, url: str, server: Server
) -> None:
    (port,) = free_ports(1)
    http = f"127.0.0.1:{port}"
    with controller(tmp_path / "first", "--journal", url) as first:
        second = Controller(tmp_path / "second", "--journal", url, "--wait", "--http", http)
        starting = threading.Thread(target=second.start)
        starting.start()
        try:
            wait_for(lambda: second.stderr.exists(), "it begins")
            wait_for(lambda: "controller waits: " in second.stderr.read_text(), "it to wait")
            status, document = probe(http, "/healthz")
            assert (status, document.keys()) == (200, {"ok", "waits"})
            assert document["waits"].endswith(": another controller uses this database")
            server.stop()
            try:
                assert first.process is not None
                assert first.process.wait(60) == 1
                wait_for(lambda: "cannot be opened" in second.stderr.read_text(), "it to look")
                assert starting.is_alive()
                # It is not to be started anew for it, and nobody is sent there.
                assert "cannot be opened" in probe(http, "/healthz")[1]["waits"]
                assert "cannot be opened" in probe(http, "/readyz")[1]["reason"]
                assert PASSWORD not in str(probe(http, "/readyz"))
            finally:
                server.start()
            starting.join()
            assert probe(http, "/readyz") == (200, {"ok": True, "term": 2})
            with Client(second.grpc) as client:
                assert client.list() == ()
        finally:
            starting.join()
            second.stop()


def test_frozen_controller_is_deposed_and_ends_when_it_wakes(
    tmp_path: Path, url: str, server: Server
) -> None:
    """Workers hear of nothing."""

    async def scenario() -> None:
        with controller(tmp_path / "first", "--journal", url) as first:
            second = Controller(tmp_path / "second", "--journal", url, "--wait")
            starting = threading.Thread(target=second.start)
            starting.start()
            address = first.grpc
            agent = FakeAgent("n0", lambda: address)
            try:
                agent.start()
                await until(lambda: agent.is_connected, "the agent joins")
                with Client(address) as client:
                    job_id = client.submit(spec_document(parallel={"dp": 1})).job_id
                await until(lambda: bool(agent.running), "workers run")
                await agent.progress(2)
                with Client(address) as client:
                    await until(lambda: client.get(job_id)[0].state == "RUNNING", "it trains")
                await until(second.stderr.exists, "the second one begins")
                await until(lambda: "controller waits: " in second.stderr.read_text(), "it to wait")
                commands = agent.kinds()
                os.kill(first.pid, signal.SIGSTOP)
                await until(lambda: not starting.is_alive(), "the second one leads")
                assert "has not renewed its lease" in second.stderr.read_text()
                # Both are asked: the one that is frozen takes the connection, and says nothing.
                with Client(f"{address},{second.grpc}") as client:
                    assert client.get(job_id)[0].attempt == 1
                    client.submit(spec_document(name="later"))
                    address = second.grpc
                    os.kill(first.pid, signal.SIGCONT)
                    await until(lambda: agent.is_connected, "the agent comes back")
                    await until(lambda: agent.welcomes[-1].term == 2, "to the second one")
                    assert first.process is not None
                    assert await asyncio.to_thread(first.process.wait, 60) == 1
                    assert client.get(job_id)[0].state == "RUNNING"
                assert agent.kinds() == commands
                # Of what was written since the second term began, nothing is of the first.
                terms = server.sql(str(parse_url(url).database), TERMS)
                assert terms.splitlines() == sorted(terms.splitlines())
                assert set(terms.splitlines()) == {"1", "2"}
            finally:
                if first.process is not None and first.process.poll() is None:
                    os.kill(first.pid, signal.SIGCONT)
                starting.join()
                await agent.stop()
                second.stop()

    asyncio.run(scenario())


TERMS = "SELECT term FROM facts ORDER BY seq"
