"""Archives of code come to a controller whole or not at all, and stay while a job needs them."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from bench import bare_controller
from controller import config_file, join_token
from controller.convert import plan_of
from controller.core.events import JobCancelRequested, JobSubmitted
from controller.core.retention import Retention
from controller.retention import Keeper
from controller.rpc import code as rpc_code
from controller.store.code import ROOM_BYTES, CodeStore, Draft, NoRoomError
from outlast.code.digest import CHUNK_BYTES
from outlast.code.errors import CodeError
from outlast.ids import JobId
from outlast.spec.parse import parse_spec
from outlast.v1 import code_pb2, jobs_pb2
from outlast.v1.code_pb2_grpc import CodeStub
from tests.controller.fakes import Lab, lab, until
from tests.controller.test_rpc import failure, reasons, violations

CONTENT = b"a" * (CHUNK_BYTES + 5)


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def requests(
    content: bytes, digest: str = "", size_bytes: int | None = None
) -> Iterator[code_pb2.PutCodeRequest]:
    size_bytes = len(content) if size_bytes is None else size_bytes
    yield code_pb2.PutCodeRequest(digest=digest or digest_of(content), size_bytes=size_bytes)
    for start in range(0, len(content), CHUNK_BYTES):
        yield code_pb2.PutCodeRequest(data=content[start : start + CHUNK_BYTES])


async def find(bench: Lab, digest: str) -> code_pb2.FindCodeResponse:
    stub = CodeStub(bench.channel)
    return await stub.FindCode(code_pb2.FindCodeRequest(digest=digest))


async def fetched(bench: Lab, digest: str) -> bytes:
    call = CodeStub(bench.channel).GetCode(code_pb2.GetCodeRequest(digest=digest))
    return b"".join([response.data async for response in call])


def kept(state_dir: Path) -> list[str]:
    return sorted(path.name for path in (state_dir / "code").glob("*"))


def test_what_is_brought_can_be_fetched_also_when_two_bring_it_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        digest = digest_of(CONTENT)
        async with lab(tmp_path) as bench:
            answer = await find(bench, digest)
            assert (answer.is_here, answer.max_bytes) == (False, 64 << 20)
            stub = CodeStub(bench.channel)
            await asyncio.gather(*(stub.PutCode(requests(CONTENT)) for _ in range(3)))
            assert (await find(bench, digest)).is_here
            assert await fetched(bench, digest) == CONTENT
        assert kept(tmp_path) == [digest.removeprefix("sha256:")]
        async with lab(tmp_path) as bench:
            assert await fetched(bench, digest) == CONTENT, "after a restart"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("content", "digest", "size_bytes", "said"),
    [
        (b"abc", digest_of(b"abd"), None, "with the digest sha256:"),
        (b"abc", "", 4, "came as 3 bytes"),
        (b"abc", "", 2, "more than the 2 bytes"),
        (b"abc", "", 0, "allowed: 1 to 67,108,864"),
        (b"abc", "", (64 << 20) + 1, "allowed: 1 to 67,108,864"),
        (b"abc", "../../etc/passwd", None, "64 hexadecimal digits"),
    ],
    ids=["digest", "short", "long", "empty", "large", "name"],
)
def test_an_upload_that_is_not_what_it_says_leaves_nothing(
    tmp_path: Path, content: bytes, digest: str, size_bytes: int | None, said: str
) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            call = CodeStub(bench.channel).PutCode(requests(content, digest, size_bytes))
            error = await failure(call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in (error.details() or "")
            assert kept(tmp_path) == []

    asyncio.run(scenario())


def test_an_upload_that_breaks_or_stalls_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(rpc_code, "TRANSFER_TIMEOUT_S", 0.5)
        async with lab(tmp_path) as bench:
            broken = CodeStub(bench.channel).PutCode()
            await broken.write(next(requests(CONTENT)))
            await until(lambda: len(kept(tmp_path)) == 1, "the upload begins")
            broken.cancel()
            await until(lambda: not kept(tmp_path), "nothing is left of it")
            stalled = CodeStub(bench.channel).PutCode()
            await stalled.write(next(requests(CONTENT)))
            error = await failure(stalled)
            assert reasons(error) == ["UPLOAD_TOO_SLOW"]
            assert not kept(tmp_path)

    asyncio.run(scenario())


def test_a_full_disk_refuses_an_upload_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: Draft, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            monkeypatch.setattr(Draft, "write", write)
            error = await failure(CodeStub(bench.channel).PutCode(requests(CONTENT)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "No space left on device" in (error.details() or "")
            assert not kept(tmp_path)

    asyncio.run(scenario())


def free_bytes(monkeypatch: pytest.MonkeyPatch, *answers: int) -> None:
    """What the disk has left, at each look; the last stays."""
    left = list(answers)

    def statvfs(path: object) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=left.pop(0) if len(left) > 1 else left[0], f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_an_archive_without_room_beside_the_journal_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            free_bytes(monkeypatch, ROOM_BYTES + len(CONTENT) - 1)
            error = await failure(CodeStub(bench.channel).PutCode(requests(CONTENT)))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert reasons(error) == ["NO_ROOM"]
            assert "too few for an archive of 1 MiB beside its journal" in (error.details() or "")
            assert not kept(tmp_path)
            free_bytes(monkeypatch, ROOM_BYTES + len(CONTENT), ROOM_BYTES)
            await CodeStub(bench.channel).PutCode(requests(CONTENT))
            assert len(kept(tmp_path)) == 1

    asyncio.run(scenario())


def test_an_archive_that_has_begun_has_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CodeStore(tmp_path / "code")
    with store.begin(digest_of(CONTENT), len(CONTENT)):
        (draft,) = (tmp_path / "code").iterdir()
        assert draft.stat().st_blocks * 512 >= len(CONTENT)
    # Another has taken it between the look and the reservation.
    free_bytes(monkeypatch, ROOM_BYTES + len(CONTENT), ROOM_BYTES - 1)
    with pytest.raises(NoRoomError):
        store.begin(digest_of(CONTENT), len(CONTENT))
    assert not kept(tmp_path)


def test_a_quota_shows_when_the_room_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fallocate(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(NoRoomError):
        CodeStore(tmp_path / "code").begin(digest_of(CONTENT), len(CONTENT))
    assert not kept(tmp_path)


def test_no_more_downloads_go_at_once_than_allowed_and_a_stalled_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_code, "MAX_DOWNLOADS", 2)
    monkeypatch.setattr(rpc_code, "TRANSFER_TIMEOUT_S", 1.0)
    # More than is on its way before anything is read of it.
    content = bytes(32 << 20)

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            stub = CodeStub(bench.channel)
            await stub.PutCode(requests(content))
            request = code_pb2.GetCodeRequest(digest=digest_of(content))
            stalled = [stub.GetCode(request) for _ in range(2)]
            for call in stalled:
                assert (await call.read()).data
            # Nobody reads on, and both of the places are taken until their time is up.
            assert await fetched(bench, digest_of(content)) == content
            for call in stalled:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await read_on(call)
                assert reasons(caught.value) == ["DOWNLOAD_TOO_SLOW"]

    asyncio.run(scenario())


async def read_on(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    while (await call.read()) is not grpc.aio.EOF:
        pass


def test_code_that_cannot_be_read_is_deleted_and_can_be_brought_again(tmp_path: Path) -> None:
    digest = digest_of(CONTENT)

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            stub = CodeStub(bench.channel)
            await stub.PutCode(requests(CONTENT))
            path = tmp_path / "code" / digest.removeprefix("sha256:")
            path.write_bytes(CONTENT[:-1])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fetched(bench, digest)
            assert caught.value.code() is grpc.StatusCode.DATA_LOSS
            assert reasons(caught.value) == ["CODE_DAMAGED"]
            assert not (await find(bench, digest)).is_here
            await stub.PutCode(requests(CONTENT))
            assert await fetched(bench, digest) == CONTENT

    asyncio.run(scenario())


def test_code_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fetched(bench, digest_of(b""))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fetched(bench, "lock")
            assert violations(caught.value) == ["digest"]

    asyncio.run(scenario())


def test_code_goes_to_those_with_the_join_token_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        token = tmp_path / "token"
        join_token.make_if_missing(token)
        async with lab(tmp_path / "state", join_token_file=token) as bench:
            stub = CodeStub(bench.channel)
            await stub.PutCode(requests(CONTENT))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fetched(bench, digest_of(CONTENT))
            assert reasons(caught.value) == ["JOIN_TOKEN_MISSING"]
            request = code_pb2.GetCodeRequest(digest=digest_of(CONTENT))
            call = stub.GetCode(request, metadata=join_token.metadata(token))
            assert b"".join([each.data async for each in call]) == CONTENT

    asyncio.run(scenario())


def test_code_is_kept_while_it_is_used_or_was_asked_for_lately(tmp_path: Path) -> None:
    store = CodeStore(tmp_path / "code")
    assert store.delete_unused(()) == 0
    for content in (b"used", b"unused", b"asked for"):
        with store.begin(digest_of(content), len(content)) as draft:
            draft.write(content)
            draft.finish()
        os.utime(store.path_of(digest_of(content)), (1, 1))
    assert store.find(digest_of(b"asked for"))
    assert store.delete_unused({digest_of(b"used")}) == 1
    assert not store.find(digest_of(b"unused"))
    assert store.find(digest_of(b"used"))
    assert store.find(digest_of(b"asked for"))


def test_code_goes_when_the_last_job_that_names_it_has_ended(tmp_path: Path) -> None:
    digest = digest_of(CONTENT)
    spec = parse_spec(
        {"name": "job", "workload": {"command": ["python", "x.py"], "code": {"digest": digest}}}
    )

    async def scenario() -> None:
        store = CodeStore(tmp_path / "code")
        async with bare_controller.controller(tmp_path) as bench:
            keeper = Keeper(bench.service, Retention(), store)
            with store.begin(digest, len(CONTENT)) as draft:
                draft.write(CONTENT)
                draft.finish()
            job = JobId("job-1")
            await bench.service.tell(
                JobSubmitted(
                    job_id=job,
                    name=spec.name,
                    request_id=job,
                    spec_json=spec.canonical_json(),
                    checkpoint_url="",
                    plan=plan_of(spec),
                )
            )
            os.utime(store.path_of(digest), (1, 1))
            await keeper.look()
            assert len(kept(tmp_path)) == 1
            await bench.service.tell(JobCancelRequested(job_id=job))
            await keeper.look()
            assert not kept(tmp_path)

    asyncio.run(scenario())


def test_unused_code_goes_also_while_the_journals_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on that disk, and may be what fills it."""

    async def scenario() -> None:
        store = CodeStore(tmp_path / "code")
        async with bare_controller.controller(tmp_path) as bench:
            with store.begin(digest_of(CONTENT), len(CONTENT)) as draft:
                draft.write(CONTENT)
                draft.finish()
            os.utime(store.path_of(digest_of(CONTENT)), (1, 1))
            monkeypatch.setattr(type(bench.service), "read_only", "the disk is full")
            assert await Keeper(bench.service, Retention(), store).look() == 0
            assert not kept(tmp_path)

    asyncio.run(scenario())


def test_a_job_is_taken_with_code_that_is_here_only(tmp_path: Path) -> None:
    def request(**code: str) -> jobs_pb2.SubmitRequest:
        made = jobs_pb2.SubmitRequest(wait_for_nodes=True)
        made.spec.update(
            {"name": "job", "workload": {"command": ["python", "x.py"], "code": dict(code)}}
        )
        return made

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            error = await failure(bench.jobs.Submit(request(path="/home/me")))
            assert violations(error) == ["workload.code.digest"]
            assert "send the folder" in (error.details() or "")
            error = await failure(bench.jobs.Submit(request(digest=digest_of(CONTENT))))
            assert violations(error) == ["workload.code.digest"]
            assert "this controller has no such code" in (error.details() or "")
            await CodeStub(bench.channel).PutCode(requests(CONTENT))
            job = (await bench.jobs.Submit(request(digest=digest_of(CONTENT)))).job
            assert job.state == "QUEUED"

    asyncio.run(scenario())


def test_what_a_killed_controller_had_half_of_is_gone_at_the_next_start(tmp_path: Path) -> None:
    store = CodeStore(tmp_path / "code")
    with store.begin(digest_of(CONTENT), len(CONTENT)) as draft:
        draft.write(b"half")
        assert len(kept(tmp_path)) == 1
        CodeStore(tmp_path / "code")
        assert not kept(tmp_path)


def test_the_limit_is_the_configurations(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("code: {max_mib: 2}\n")
    assert config_file.read(file).max_code_bytes == 2 << 20
    with pytest.raises(CodeError, match="allowed: 1 to 2,097,152"):
        CodeStore(tmp_path, 2 << 20).begin(digest_of(b""), (2 << 20) + 1)
    for wrong in ("0", "1.5", "lots"):
        file.write_text(f"code: {{max_mib: {wrong}}}\n")
        with pytest.raises(ValueError, match=r"code.max_mib is .*; allowed: a whole number, 1 to"):
            config_file.read(file)
