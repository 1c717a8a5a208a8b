"""Sending one file: what is retried, what is not, and how much is on its way at once."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoint.core.pacing import TransferLimits
from checkpoint.errors import StorageUnavailableError
from checkpoint.storage.local import LocalFolder
from checkpoint.storage.storage import Storage
from checkpoint.upload.transfer import StoppedError, Transfer
from tests.checkpoint.helpers import DEADLINE_S

PART_BYTES = 8 << 20
LIMITS = TransferLimits(memory_bytes=4 * PART_BYTES)
# Three parts and a piece.
PAYLOAD = memoryview(bytes(range(256)) * (26 << 12))

Write = Callable[[int, memoryview], None]


class Pauses:
    """Waits of a transfer, which take no time here."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []
        self.is_stopping = False

    def __call__(self, seconds: float) -> bool:
        if seconds > 0:
            self.asked_s.append(seconds)
        return self.is_stopping


class Troubled:
    """A folder whose writer does something of its own before it writes a part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Write) -> None:
        make = LocalFolder.writer

        def writer(folder: LocalFolder, path: str, nbytes: int, part_bytes: int) -> object:
            made = make(folder, path, nbytes, part_bytes)
            write = made.write

            def troubled(index: int, chunk: memoryview) -> None:
                before(index, chunk)
                write(index, chunk)

            monkeypatch.setattr(made, "write", troubled)
            return made

        monkeypatch.setattr(LocalFolder, "writer", writer)


def make_transfer(
    tmp_path: Path, pauses: Pauses, limits: TransferLimits = LIMITS
) -> tuple[Storage, Transfer]:
    storage = Storage(f"file://{tmp_path}/store")
    return storage, Transfer(storage, limits, pause=pauses, jitter=lambda: 1.0)


def send(transfer: Transfer, *, within_s: float = DEADLINE_S) -> dict[int, bytes]:
    """Send the payload; returns what the transfer said of its parts."""
    heard: dict[int, bytes] = {}
    transfer.send(
        "file",
        PAYLOAD,
        lambda at, part: heard.__setitem__(at, bytes(part)),
        deadline_s=time.monotonic() + within_s,
    )
    return heard


def test_file_arrives_whole_and_every_part_is_told_once(tmp_path: Path) -> None:
    storage, transfer = make_transfer(tmp_path, Pauses())
    heard = send(transfer)
    assert storage.read_bytes("file") == PAYLOAD
    assert sorted(heard) == [0, PART_BYTES, 2 * PART_BYTES, 3 * PART_BYTES]
    assert b"".join(heard[at] for at in sorted(heard)) == PAYLOAD


def test_empty_file_arrives(tmp_path: Path) -> None:
    storage, transfer = make_transfer(tmp_path, Pauses())
    transfer.send("file", memoryview(b""), lambda at, part: None, deadline_s=time.monotonic() + 9)
    assert storage.read_bytes("file") == b""


def test_parts_go_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_there = threading.Barrier(4)
    Troubled(monkeypatch, lambda index, chunk: all_there.wait(DEADLINE_S) and None)
    storage, transfer = make_transfer(tmp_path, Pauses())
    send(transfer)
    assert storage.read_bytes("file") == PAYLOAD


def test_part_that_fails_is_sent_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: Counter[int] = Counter()

    def fail_twice(index: int, chunk: memoryview) -> None:
        tries[index] += 1
        if index == 1 and tries[index] <= 2:
            raise OSError("connection reset")

    Troubled(monkeypatch, fail_twice)
    pauses = Pauses()
    storage, transfer = make_transfer(tmp_path, pauses)
    send(transfer)
    assert storage.read_bytes("file") == PAYLOAD
    assert tries == {0: 1, 1: 3, 2: 1, 3: 1}
    assert pauses.asked_s == [0.5, 1.0]


@pytest.fixture
def host_memory() -> Iterator[mmap.mmap]:
    """As of a slot; no garbage is collected meanwhile, which may be long in an agent at rest."""
    gc.collect()
    gc.disable()
    yield mmap.mmap(-1, 1 << 16)
    gc.enable()


def test_part_that_is_sent_again_holds_no_host_memory_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_memory: mmap.mmap
) -> None:
    left = [OSError("connection reset")]

    def fail_once(index: int, chunk: memoryview) -> None:
        if left:
            raise left.pop()

    Troubled(monkeypatch, fail_once)
    _, transfer = make_transfer(tmp_path, Pauses())
    deadline_s = time.monotonic() + DEADLINE_S
    transfer.send("file", memoryview(host_memory), lambda at, part: None, deadline_s=deadline_s)
    assert not left
    # BufferError while anybody has a view of it.
    host_memory.close()


def test_file_that_is_missing_holds_no_host_memory_of_who_looked_for_it(
    tmp_path: Path, host_memory: mmap.mmap
) -> None:
    def look(view: memoryview) -> None:
        with contextlib.suppress(FileNotFoundError):
            Storage(f"file://{tmp_path}/store").read_bytes("nothing")

    look(memoryview(host_memory))
    host_memory.close()


@pytest.mark.parametrize(
    ("error", "num_tries"),
    [
        (OSError("connection reset"), 6),
        (PermissionError("403"), 1),
        (OSError(28, "full"), 1),
        # What s3fs makes of NoSuchUpload, after a server has lost it.
        (FileNotFoundError("no such upload"), 1),
    ],
)
def test_part_that_keeps_failing_fails_the_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, num_tries: int
) -> None:
    tries: Counter[int] = Counter()

    def fail(index: int, chunk: memoryview) -> None:
        tries[index] += 1
        if index == 0:
            raise error

    Troubled(monkeypatch, fail)
    storage, transfer = make_transfer(tmp_path, Pauses())
    with pytest.raises(StorageUnavailableError, match=error.args[-1]):
        send(transfer)
    assert tries[0] == num_tries
    assert storage.entries("") == []


def test_deadline_ends_the_tries_and_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(index: int, chunk: memoryview) -> None:
        raise OSError("connection reset")

    Troubled(monkeypatch, fail)
    _, transfer = make_transfer(tmp_path, Pauses())
    with pytest.raises(StorageUnavailableError, match=r"only 0 of .* were sent in time") as caught:
        send(transfer, within_s=0.4)
    assert caught.value.lasting


def test_stopping_ends_a_transfer_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = Pauses()

    def stop(index: int, chunk: memoryview) -> None:
        pauses.is_stopping = True
        raise OSError("connection reset")

    Troubled(monkeypatch, stop)
    storage, transfer = make_transfer(tmp_path, pauses)
    with pytest.raises(StoppedError):
        send(transfer)
    assert storage.entries("") == []


def test_budget_spaces_the_parts(tmp_path: Path) -> None:
    pauses = Pauses()
    slow = TransferLimits(memory_bytes=4 * PART_BYTES, bytes_per_s=4.0 * PART_BYTES)
    _, transfer = make_transfer(tmp_path, pauses, slow)
    send(transfer)
    # The first goes at once; the last waits for what three parts take of the budget.
    assert len(pauses.asked_s) == 3
    assert 0 < max(pauses.asked_s) <= 0.75


def test_store_that_takes_files_in_order_gets_them_in_order() -> None:
    storage = Storage(f"memory://transfer-{time.monotonic_ns()}")
    transfer = Transfer(storage, LIMITS, pause=Pauses(), jitter=lambda: 1.0)
    order: list[int] = []
    transfer.send(
        "file",
        PAYLOAD,
        lambda at, part: order.append(at),
        deadline_s=time.monotonic() + DEADLINE_S,
    )
    assert order == sorted(order)
    assert storage.read_bytes("file") == PAYLOAD


def dead_writer(tmp_path: Path, parts: dict[int, bytes]) -> None:
    """Another process begins the file, writes these parts and dies."""
    program = (
        "import ast, os, pathlib, sys; from checkpoint.storage.local import LocalFolder;"
        f"writer = LocalFolder(pathlib.Path(sys.argv[1])).writer('file', {len(PAYLOAD)}, 8 << 20)\n"
        "for index, byte in ast.literal_eval(sys.argv[2]).items():"
        " writer.write(index, memoryview(byte * (8 << 20)))\n"
        "os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", program, f"{tmp_path}/store", repr(parts)]
    assert subprocess.run(command, check=False).returncode == -9


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where in a file each write begins."""
    places: list[int] = []
    write = os.pwrite

    def noting(handle: int, data: memoryview, at: int) -> int:
        places.append(at)
        return write(handle, data, at)

    monkeypatch.setattr("os.pwrite", noting)
    return places


def test_parts_that_a_dead_writer_left_are_not_written_again(
    tmp_path: Path, written: list[int]
) -> None:
    payload = b"".join(byte * PART_BYTES for byte in (b"a", b"b", b"c"))
    # The third is another than it should be: its writer died in the middle of it.
    dead_writer(tmp_path, {0: b"a", 2: b"x"})
    storage, transfer = make_transfer(tmp_path, Pauses())
    [_] = storage.unfinished()
    heard: list[int] = []
    deadline_s = time.monotonic() + DEADLINE_S
    transfer.send("file", payload, lambda at, part: heard.append(at), deadline_s=deadline_s)
    # Where memory is not aligned a part is tried past the cache first.
    assert set(written) == {PART_BYTES, 2 * PART_BYTES}
    assert sorted(heard) == [0, PART_BYTES, 2 * PART_BYTES]
    assert storage.read_bytes("file") == payload
    assert storage.unfinished() == []


def test_a_draft_whose_writer_lives_is_left_alone(tmp_path: Path, written: list[int]) -> None:
    """It hangs in some call, and would write into the file when it wakes up."""
    storage, transfer = make_transfer(tmp_path, Pauses())
    hung = storage.writer("file", len(PAYLOAD), PART_BYTES)
    hung.write(0, PAYLOAD[:PART_BYTES])
    written.clear()
    send(transfer)
    assert 0 in written
    hung.write(0, memoryview(bytes(PART_BYTES)))
    assert storage.read_bytes("file") == PAYLOAD
    assert len(storage.unfinished()) == 1
    hung.abort()
