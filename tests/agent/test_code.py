"""A node has the code of a job whole or not at all, and says why where it cannot have it."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import grpc.aio
import pytest

from controller.agent import code
from controller.agent.addresses import Controllers
from controller.agent.code import JobCode, delete_code, delete_left_code
from controller.agent.config import AgentConfig, Limits
from controller.agent.workers.launch import StartRefusedError
from controller.agent.workers.script_paths import in_folder
from controller.grpc_errors import Context
from controller.rpc import code as rpc_code
from controller.rpc.code import CodeService
from controller.store.code import CodeStore
from outlast.code.archive import pack
from outlast.code.unpack import check_digest, unpack
from outlast.failures import ErrorKind
from outlast.spec.parse import parse_spec
from outlast.v1.code_pb2_grpc import add_CodeServicer_to_server
from tests.agent.test_launch import config
from tests.controller.fakes import DEADLINE_S, until


@asynccontextmanager
async def served(store: CodeStore, port: int = 0, *, turn_s: float = 10.0) -> AsyncIterator[int]:
    """The service of a controller, until the end of the block; its port."""

    async def anybody(context: Context) -> None:
        return None

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_CodeServicer_to_server(CodeService(store, anybody, turn_s=turn_s), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def stored(tmp_path: Path) -> tuple[CodeStore, str]:
    """A store with an archive, and its digest."""
    root = tmp_path / "root"
    (root / "pkg").mkdir(parents=True)
    (root / "train.py").write_text("text")
    (root / "pkg" / "x.py").write_text("x")
    store = CodeStore(tmp_path / "store")
    with pack(root) as archive, store.begin(archive.digest, archive.size_bytes) as draft:
        draft.write(archive.file.read())
        draft.finish()
    return store, archive.digest


def at(tmp_path: Path, port: int, code_s: float = 60.0) -> AgentConfig:
    return replace(
        config(tmp_path), controller=f"127.0.0.1:{port}", limits=replace(Limits(), code_s=code_s)
    )


def in_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario()

    asyncio.run(run())


def job_code(config: AgentConfig) -> JobCode:
    return JobCode(config, Controllers(config))


async def refusal(code_of_job: JobCode, digest: str) -> StartRefusedError:
    with pytest.raises(StartRefusedError) as caught:
        await code_of_job.ready("job-1", digest)
    return caught.value


def left(own: AgentConfig) -> list[str]:
    return [str(path.relative_to(own.code_dir)) for path in own.code_dir.rglob("*")]


def test_code_is_fetched_once_for_a_job_and_gone_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, digest = stored(tmp_path)
        async with served(store) as port:
            own = at(tmp_path, port)
            cache = job_code(own)
            folders = await asyncio.gather(*(cache.ready("job-1", digest) for _ in range(3)))
        assert len(set(folders)) == 1
        folder = folders[0]
        assert (folder / "pkg" / "x.py").read_text() == "x"
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
        assert folder.stat().st_mode & 0o777 == 0o700
        assert await cache.ready("job-1", digest) == folder, "the controller is not asked"
        delete_code(own.code_dir, "job-1")
        assert not left(own)

    in_loop(scenario)


def test_code_is_waited_for_while_the_controller_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        store, digest = stored(tmp_path)
        async with served(store) as port:
            pass
        own = at(tmp_path, port)
        fetch = asyncio.create_task(job_code(own).ready("job-1", digest))
        tries: list[str] = []
        monkeypatch.setattr(code.logger, "warning", lambda *said: tries.append(said[0]))
        while not tries:
            await asyncio.sleep(0)
        async with served(store, port):
            assert (await fetch / "train.py").read_text() == "text"

    in_loop(scenario)


def test_a_controller_that_stays_away_costs_the_node_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, digest = stored(tmp_path)
        async with served(store) as port:
            pass
        own = at(tmp_path, port, code_s=0.2)
        error = await refusal(job_code(own), digest)
        assert error.kind is ErrorKind.RESOURCE
        assert "sent nothing of it for 0.2 s" in str(error)
        assert left(own) == ["job-1"]

    in_loop(scenario)


def test_code_that_is_damaged_or_gone_ends_the_job_and_blames_no_node(tmp_path: Path) -> None:
    async def scenario() -> None:
        store, digest = stored(tmp_path)
        async with served(store) as port:
            own = at(tmp_path, port)
            path = store.path_of(digest)
            path.write_bytes(path.read_bytes().replace(b"text", b"tEXt"))
            error = await refusal(job_code(own), digest)
            assert error.kind is ErrorKind.CONFIG
            assert "the controller's disk has it no more as it was sent" in str(error)
            assert "submit the job again" in str(error)
            assert not store.find(digest), "so that it is sent again"
            error = await refusal(job_code(own), digest)
            assert error.kind is ErrorKind.CONFIG
            assert "there is no code" in str(error)
            assert left(own) == ["job-1"]

    in_loop(scenario)


def test_a_disk_that_changes_the_archive_is_the_nodes_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(archive: IO[bytes], digest: str) -> None:
        archive.seek(100)
        archive.write(b"x")
        check_digest(archive, digest)

    async def scenario() -> None:
        store, digest = stored(tmp_path)
        monkeypatch.setattr(code, "check_digest", damage)
        async with served(store) as port:
            error = await refusal(job_code(at(tmp_path, port)), digest)
        assert error.kind is ErrorKind.RESOURCE
        assert "the disk of this node changed it" in str(error)
        assert store.find(digest)

    in_loop(scenario)


def test_a_start_that_is_given_up_leaves_no_part_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that unpacks cannot be given up: it goes on, with all that it needs."""
    is_unpacking, go_on = threading.Event(), threading.Event()

    def slow(archive: IO[bytes], into: Path) -> None:
        is_unpacking.set()
        assert go_on.wait(DEADLINE_S)
        unpack(archive, into)

    async def scenario() -> None:
        store, digest = stored(tmp_path)
        monkeypatch.setattr(code, "unpack", slow)
        async with served(store) as port:
            own = at(tmp_path, port)
            start = asyncio.create_task(job_code(own).ready("job-1", digest))
            await until(is_unpacking.is_set, "it unpacks")
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            folder = own.code_dir / "job-1" / digest.removeprefix("sha256:")
            assert not folder.exists()
            go_on.set()
            await until(folder.is_dir, "it is unpacked all the same")
        assert sorted(path.name for path in folder.rglob("*")) == ["pkg", "train.py", "x.py"]
        await until(lambda: len(list(folder.parent.iterdir())) == 1, "nothing else is left")

    in_loop(scenario)


def test_a_job_that_is_over_while_it_unpacks_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: list[AgentConfig] = []

    def late(archive: IO[bytes], into: Path) -> None:
        unpack(archive, into)
        delete_code(own[0].code_dir, "job-1")

    async def scenario() -> None:
        store, digest = stored(tmp_path)
        monkeypatch.setattr(code, "unpack", late)
        async with served(store) as port:
            own.append(at(tmp_path, port))
            error = await refusal(job_code(own[0]), digest)
        assert error.kind is ErrorKind.RESOURCE
        assert not left(own[0])

    in_loop(scenario)


def test_a_download_that_breaks_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_code, "CHUNK_BYTES", 1000)
    send, sent = CodeService._send, []

    async def break_once(self: CodeService, context: Context, data: bytes) -> None:
        sent.append(data)
        if len(sent) == 2:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "for a moment")
        await send(self, context, data)

    async def scenario() -> None:
        store, digest = stored(tmp_path)
        monkeypatch.setattr(CodeService, "_send", break_once)
        async with served(store) as port:
            folder = await job_code(at(tmp_path, port)).ready("job-1", digest)
        assert (folder / "train.py").read_text() == "text"
        assert sent[0] == sent[2]

    in_loop(scenario)


def test_a_node_waits_for_its_turn_for_as_long_as_the_controller_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_code, "MAX_DOWNLOADS", 1)

    async def scenario() -> None:
        store, digest = stored(tmp_path)
        async with served(store, turn_s=0.05) as port:
            is_let, others = asyncio.Event(), []

            async def hold(self: CodeService, wanted: str, context: Context) -> None:
                if not others:
                    others.append(context)
                    await is_let.wait()
                await send_all(self, wanted, context)

            send_all = CodeService._send_all
            monkeypatch.setattr(CodeService, "_send_all", hold)
            first = asyncio.create_task(job_code(at(tmp_path / "a", port)).ready("job-1", digest))
            await until(lambda: bool(others), "the first has its turn")
            code_s = 3.0
            second = job_code(at(tmp_path / "b", port, code_s=code_s)).ready("job-1", digest)
            waiting = asyncio.create_task(second)
            done, _ = await asyncio.wait((waiting,), timeout=3 * code_s)
            assert not done, "it waits longer than for a controller that is silent"
            is_let.set()
            await asyncio.gather(first, waiting)

    in_loop(scenario)


def test_code_is_asked_for_again_where_a_controller_freezes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent turns to the one that leads, and the code comes from there, too."""
    monkeypatch.setattr(code, "_SILENCE_S", 0.2)

    async def scenario() -> None:
        store, digest = stored(tmp_path)
        with socket.create_server(("127.0.0.1", 0)) as frozen:
            async with served(store) as port:
                first = f"127.0.0.1:{frozen.getsockname()[1]}"
                own = replace(at(tmp_path, port), controller=f"{first},127.0.0.1:{port}")
                controllers = Controllers(own)
                fetch = asyncio.create_task(JobCode(own, controllers).ready("job-1", digest))
                done, _ = await asyncio.wait((fetch,), timeout=0.5)
                assert not done
                controllers.has_failed()
                assert (await fetch / "train.py").read_text() == "text"

    in_loop(scenario)


def test_a_full_disk_is_the_nodes_trouble_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(archive: IO[bytes], into: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scenario() -> None:
        store, digest = stored(tmp_path)
        monkeypatch.setattr(code, "unpack", full)
        async with served(store) as port:
            own = at(tmp_path, port)
            error = await refusal(job_code(own), digest)
        assert error.kind is ErrorKind.RESOURCE
        assert f"cannot be unpacked to {own.code_dir}" in str(error)
        assert "No space left on device" in str(error)
        assert left(own) == ["job-1"]

    in_loop(scenario)


def test_code_of_a_job_that_was_forgotten_goes_when_it_is_old(tmp_path: Path) -> None:
    code_dir, memory_dir = tmp_path / "code", tmp_path / "memory"
    for job, at_s in (("forgotten", 10), ("paused", 10), ("starting", 100)):
        (code_dir / job).mkdir(parents=True)
        os.utime(code_dir / job, (at_s, at_s))
    (memory_dir / "paused").mkdir(parents=True)
    delete_left_code(code_dir, memory_dir, older_than_s=50)
    assert sorted(path.name for path in code_dir.iterdir()) == ["paused", "starting"]


def test_relative_paths_are_those_of_the_code() -> None:
    workload = {
        "command": ["python", "src/train.py", "data/x"],
        "python_path": ["src", "/opt/lib"],
        "code": {"digest": f"sha256:{'0' * 64}"},
    }
    placed = in_folder(parse_spec({"name": "job", "workload": workload}), Path("/code")).workload
    assert placed.command == ("python", "src/train.py", "data/x")
    assert (placed.working_dir, placed.python_path) == ("/code", ("/code/src", "/opt/lib"))
    workload |= {"working_dir": "runs"}
    placed = in_folder(parse_spec({"name": "job", "workload": workload}), Path("/code")).workload
    assert placed.command == ("python", "/code/src/train.py", "data/x")
    assert placed.working_dir == "/code/runs"
