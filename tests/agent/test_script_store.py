"""The store at which the ranks of a script meet: of one attempt, on the agent's own socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from controller.agent.workers.processes import process_state
from controller.agent.workers.script_store import ScriptStore
from tests.agent.standbys import NoStandby, inheriting, running


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with inheriting(), socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def client(listening: socket.socket) -> TCPStore:
    port = listening.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))


@pytest.mark.parametrize("has_standby", [True, False])
def test_each_attempt_has_an_empty_store_at_the_same_place(
    tmp_path: Path, listening: socket.socket, has_standby: bool
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (standby, _):
            store = ScriptStore(
                standby if has_standby else NoStandby(),
                rendezvous_fd=listening.fileno(),
                host="127.0.0.1",
                log_path=tmp_path / "store.log",
            )
            pids = []
            for _ in range(2):
                await store.start("job")
                pids.append(store.pid)
                rank = await asyncio.to_thread(client, listening)
                assert not await asyncio.to_thread(rank.check, ["key"])
                await asyncio.to_thread(rank.set, "key", "value")
            first, second = pids
            assert first is not None
            assert second is not None
            assert process_state(first) == "", "the one before has ended"
            await store.end_of("another job")
            assert store.pid == second
            await store.end_of("job")
            assert (store.pid, process_state(second)) == (None, "")
            await store.close()

    asyncio.run(scenario())


def test_a_rank_that_comes_before_the_store_waits_for_it(
    tmp_path: Path, listening: socket.socket
) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (standby, _):
            early = asyncio.create_task(asyncio.to_thread(client, listening))
            store = ScriptStore(
                standby,
                rendezvous_fd=listening.fileno(),
                host="127.0.0.1",
                log_path=tmp_path / "store.log",
            )
            await store.start("job")
            rank = await early
            await asyncio.to_thread(rank.set, "key", "value")
            other = await asyncio.to_thread(client, listening)
            assert await asyncio.to_thread(other.get, "key") == b"value"
            await store.close()

    asyncio.run(scenario())


def test_a_store_that_cannot_start_says_where_to_look(tmp_path: Path) -> None:
    async def scenario() -> None:
        reading, writing = os.pipe()
        try:
            store = ScriptStore(
                NoStandby(), rendezvous_fd=reading, host="127.0.0.1", log_path=tmp_path / "s.log"
            )
            with pytest.raises(Exception, match=r"did not start; see .*s\.log"):
                await store.start("job")
            assert store.pid is None
        finally:
            os.close(reading)
            os.close(writing)

    with inheriting():
        asyncio.run(scenario())
