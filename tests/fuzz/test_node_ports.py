"""What a node listens on, replica port and lines of workers; and what workers are given."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from checkpoint.checksums import CHECKSUM, block_checksum
from checkpoint.replicas.encryption import Encryption, dialled
from checkpoint.replicas.holder import Duty, Holder
from checkpoint.stage.payload import make_table
from controller.agent.mistakes import Mistakes
from controller.agent.workers.lines import WorkerLines
from outlast.worker_contract import ContractError, WorkerContract
from outlast.worker_line import Left, connect, from_worker, read_from_agent, read_from_worker
from tests.checkpoint.helpers import make_tensors
from tests.contracts import contract_of
from tests.fuzz.inputs import COUNT, damaged, descriptors, memory_bytes, nested, noise, several

PID = "self"
JOB, TOKEN = "gpt-abcde", "0123456789abcdef"
MAX_GROWTH_BYTES = 64 << 20
_FRAME = struct.Struct("<IQ")
# More than any test does within a second, much less than a connection may be silent.
PATIENCE_S = 20.0


@pytest.fixture
def no_thread_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    failed: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda given: failed.append(repr(given)))
    yield
    assert failed == []


def eventually(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def framed(text: bytes) -> bytes:
    return _FRAME.pack(len(text), block_checksum(CHECKSUM, text)) + text


def hello(rng: random.Random) -> bytes:
    """What a line begins with, right in most."""
    message = {"kind": "hello", "token": TOKEN, "job": JOB, "attempt": 3}
    if rng.random() < 0.3:
        name = rng.choice(sorted(message))
        message[name] = rng.choice((None, -1, 2**70, "x" * 5000, [], {}, 1.5, "../.."))
    return json.dumps(message).encode()


def table(rng: random.Random) -> object:
    """Of a small tensor, or what is none."""
    whole = make_table(0, 2, make_tensors(1, ranks=2)).to_json()
    hurt = damaged(rng, whole).decode(errors="replace")
    return rng.choice((whole.decode(), whole.decode(), hurt, "", "{}", "{", 5))


def request(rng: random.Random) -> bytes:
    message: dict[str, object] = {
        "kind": rng.choice(("put", "list", "get", "grab")),
        "rank": rng.choice((0, 1, -1, 2**70, "0", None)),
        "attempt": rng.choice((3, -1, "3", [])),
        "step": rng.choice((7, 2**64, None)),
        "digest": rng.choice((make_table(0, 2, make_tensors(1, ranks=2)).digest, 1, None)),
        "table": table(rng),
        "needed": rng.choice((None, [], [1], [[1]], [[1, 2]], [["a", None]], "x")),
        "own": rng.choice((True, False, "yes")),
    }
    for name in rng.sample(sorted(message), rng.randrange(4)):
        del message[name]
    return json.dumps(message).encode()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_the_replica_port_hangs_up_on_what_makes_no_sense(
    tmp_path: Path, no_thread_fails: None, is_encrypted: bool
) -> None:
    encryption = Encryption() if is_encrypted else None
    holder = Holder(tmp_path, "127.0.0.1", TOKEN, encryption)
    through = "" if encryption is None else encryption.token("")
    holder.take_duty(JOB, Duty(attempt=3, ranks=frozenset({0, 1}), bytes_per_s=None))
    memory, files = memory_bytes(PID), descriptors(PID)
    try:
        for rng in several(seed=10):
            parts = [framed(hello(rng))]
            parts += [framed(request(rng)) for _ in range(rng.randrange(3))]
            parts += [framed(nested(rng))] if rng.random() < 0.1 else []
            data = rng.choice((b"".join(parts), damaged(rng, b"".join(parts)), noise(rng)))
            address = ("127.0.0.1", holder.port)
            with (
                contextlib.suppress(OSError),
                socket.create_connection(address, timeout=5) as plain,
                # Some do not get as far as that.
                dialled(plain, through if rng.random() < 0.8 else "") as line,
            ):
                line.sendall(data)
                line.shutdown(socket.SHUT_WR)
                while line.recv(4096):
                    pass
        eventually(lambda: descriptors(PID) <= files + 4, "lines stay open")
        assert memory_bytes(PID) < memory + MAX_GROWTH_BYTES
        # It is all there still.
        plain = socket.create_connection(("127.0.0.1", holder.port), timeout=5)
        with dialled(plain, through) as line:
            right = {"kind": "hello", "token": TOKEN, "job": JOB, "attempt": 3}
            line.sendall(framed(json.dumps(right).encode()))
            assert b'{"ok": true}' in line.recv(4096)
    finally:
        holder.close()


def test_who_has_not_shown_the_token_takes_no_memory(tmp_path: Path) -> None:
    holder = Holder(tmp_path, "127.0.0.1", TOKEN)
    try:
        with socket.create_connection(("127.0.0.1", holder.port), timeout=5) as line:
            # 64 MiB are announced, and not waited for.
            line.sendall(_FRAME.pack(64 << 20, 0))
            assert line.recv(1) == b""
    finally:
        holder.close()


def test_a_workers_line_is_closed_and_noted_when_it_says_nothing_sensible() -> None:
    heard: list[tuple[int, Left]] = []

    async def scenario() -> None:
        lines = WorkerLines(lambda pid, left: heard.append((pid, left)), Mistakes())
        await lines.start()
        files = descriptors(PID)
        try:
            for rng in several(seed=11):
                whole = from_worker(Left(rng.randrange(5)))
                data = rng.choice(
                    (damaged(rng, whole), noise(rng), nested(rng) + b"\n", b"x" * 200_000)
                )
                await asyncio.to_thread(_said, lines.address, data)
            heard.clear()
            await asyncio.to_thread(_said, lines.address, from_worker(Left(4)))
            async with asyncio.timeout(PATIENCE_S):
                while not heard:
                    await asyncio.sleep(0.01)
                while descriptors(PID) > files + 4:
                    await asyncio.sleep(0.01)
        finally:
            lines.close()

    problems: list[object] = []
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    loop.run_until_complete(scenario())
    loop.close()
    assert problems == []
    assert [left for _, left in heard] == [Left(4)]


def _said(address: str, data: bytes) -> None:
    with contextlib.suppress(OSError), connect(address) as line:
        line.settimeout(5)
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        while line.recv(4096):
            pass


def test_lines_that_are_none_are_errors_of_value() -> None:
    for rng in several(10 * COUNT, seed=12):
        data = rng.choice((noise(rng), damaged(rng, from_worker(Left(3)))))
        for read in (read_from_worker, read_from_agent):
            with contextlib.suppress(ValueError):
                read(data)
    for rng in several(COUNT // 10, seed=13):
        for read in (read_from_worker, read_from_agent):
            with contextlib.suppress(ValueError):
                read(nested(rng))


def test_a_contract_that_is_none_names_the_key_that_is_wrong(tmp_path: Path) -> None:
    right = contract_of(tmp_path).to_env()
    keys = sorted(right)
    for rng in several(10 * COUNT, seed=14):
        given = dict(right)
        for key in rng.sample(keys, rng.choice((1, 1, 2))):
            if rng.random() < 0.2:
                del given[key]
            else:
                text = rng.choice((damaged(rng, given[key].encode()), noise(rng)))
                given[key] = text.decode(errors="surrogateescape")
        said = _refusal(given)
        assert said == "" or any(key in said for key in keys), said
    for rng in several(COUNT // 10, seed=15):
        _refusal({**right, rng.choice(keys): nested(rng).decode(errors="replace")})


def _refusal(given: Mapping[str, str]) -> str:
    try:
        WorkerContract.from_env(given)
    except ContractError as error:
        return str(error)
    return ""
