from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from checkpoint.errors import CorruptCheckpointError, StorageUnavailableError
from checkpoint.storage import local
from checkpoint.storage.hung import MAX_HUNG_CALLS, num_hung, store_of
from checkpoint.storage.storage import Storage
from tests.checkpoint.conftest import both_stores
from tests.checkpoint.helpers import DEADLINE_S, assert_one_of_many_creates, commit_steps


class StuckFileSystem(MemoryFileSystem):
    """A store that takes a request and does not answer while `stuck` is set."""

    protocol = ("stuck", "memory")
    stuck = threading.Event()
    let_go = threading.Event()
    # Calls under way: it changes what it holds when they come back, though nobody waits for them.
    under_way: ClassVar[list[str]] = []

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        with self._answering(path):
            return super().open(path, mode, **kwargs)

    def cat_file(self, path: str, **kwargs: Any) -> Any:
        with self._answering(path):
            return super().cat_file(path, **kwargs)

    @contextmanager
    def _answering(self, path: str) -> Iterator[None]:
        self.under_way.append(path)
        try:
            if self.stuck.is_set():
                self.let_go.wait(DEADLINE_S)
            yield
        finally:
            self.under_way.remove(path)


@pytest.fixture
def stuck_url() -> Iterator[str]:
    fsspec.register_implementation("stuck", StuckFileSystem, clobber=True)
    StuckFileSystem.stuck.clear()
    StuckFileSystem.let_go.clear()
    yield f"stuck://{uuid.uuid4().hex}/job-1"
    StuckFileSystem.stuck.clear()
    StuckFileSystem.let_go.set()


@both_stores
def test_files_come_back_whole_and_in_ranges(url: str) -> None:
    storage = Storage(url)
    path = "step-00000001.1/__0_0.distcp"
    writer = storage.writer(path, 6, 3)
    for index, part in enumerate((b"abc", b"def")):
        writer.write(index, memoryview(part))
    writer.finish()
    assert storage.read_bytes(path) == b"abcdef"
    assert storage.read_range(path, 2, 4) == b"cd"
    assert storage.read_range(path, 4, 99) == b"ef"
    into = bytearray(b"....")
    assert storage.read_into(path, 3, memoryview(into)) == 3
    assert into == b"def."
    assert storage.size(path) == 6
    storage.write_bytes(path, b"new")
    assert storage.read_bytes(path) == b"new"
    [entry] = storage.entries("step-00000001.1")
    assert (entry.name, entry.is_folder, entry.nbytes) == ("__0_0.distcp", False, 3)
    assert [folder.name for folder in storage.entries("") if folder.is_folder] == [
        "step-00000001.1"
    ]


@both_stores
def test_missing_file_is_told_from_storage_that_fails(url: str) -> None:
    storage = Storage(url)
    assert storage.committed_steps() == []
    assert storage.entries("nothing") == []
    with pytest.raises(FileNotFoundError):
        storage.read_bytes("nothing")
    with pytest.raises(FileNotFoundError):
        storage.size("nothing")
    storage.delete_file("nothing")
    storage.delete_folder("nothing")


@both_stores
def test_of_many_writers_exactly_one_creates_a_record(url: str) -> None:
    storage = Storage(url)
    winner = assert_one_of_many_creates(storage)
    # A request that was sent twice is ours both times.
    assert storage.put_if_absent("commits/00000001.json", winner)


def test_folder_without_hard_links_still_has_one_winner(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(local.os, "link", no_links)
    storage = Storage(url)
    assert storage.put_if_absent("commits/00000001.json", b"first")
    assert not storage.put_if_absent("commits/00000001.json", b"second")
    assert storage.read_bytes("commits/00000001.json") == b"first"
    assert [entry.name for entry in storage.entries("commits")] == ["00000001.json"]


def test_file_appears_only_when_it_is_whole(url: str) -> None:
    storage = Storage(url)

    writer = storage.writer("step-00000001.1/__0_0.distcp", 8, 4)
    writer.write(0, memoryview(b"half"))
    assert not any(entry.name.startswith("__") for entry in storage.entries("step-00000001.1"))
    writer.abort()
    assert storage.entries("step-00000001.1") == []


@pytest.mark.parametrize("shift", [0, 1])
def test_large_file_is_whole_wherever_its_bytes_lie(url: str, shift: int) -> None:
    """Aligned memory goes past the page cache, other memory through it."""
    nbytes, part_bytes = (5 << 20) + 123, 2 << 20
    memory = mmap.mmap(-1, nbytes + shift)
    memory.write((bytes(range(251)) * (nbytes // 251 + 2))[: nbytes + shift])
    payload = memoryview(memory)[shift:]
    chunks = [payload[at : at + part_bytes] for at in range(0, nbytes, part_bytes)]
    storage = Storage(url)
    storage.write_chunks("file", chunks, nbytes=nbytes, part_bytes=part_bytes)
    assert storage.read_bytes("file") == payload


@both_stores
def test_probe_passes_and_leaves_nothing(url: str) -> None:
    Storage(url).probe()
    assert Storage(url).entries("") == []


def test_probe_of_an_unwritable_url_names_url_and_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for url, cause in (
        (f"file://{tmp_path}/file/job-1", "Not a directory"),
        ("file:///proc/nowhere/job-1", "No such file or directory"),
    ):
        with pytest.raises(StorageUnavailableError, match=cause) as caught:
            Storage(url).probe()
        assert url in str(caught.value)
        assert caught.value.lasting


def test_probe_of_a_read_only_mount_names_url_and_cause(
    small_tmpfs: Callable[[int], Path],
) -> None:
    folder = small_tmpfs(1 << 20)
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    with pytest.raises(StorageUnavailableError, match="Read-only file system") as caught:
        Storage(f"file://{folder}/job-1").probe()
    assert f"file://{folder}/job-1" in str(caught.value)


def test_probe_finds_a_store_that_replaces_what_exists(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(self: local.LocalFolder, path: str, data: bytes) -> bool:
        writer = self.writer(path, len(data), len(data))
        writer.write(0, memoryview(data))
        writer.finish()
        return True

    monkeypatch.setattr(local.LocalFolder, "create", replace)
    with pytest.raises(StorageUnavailableError, match="replaced a file that exists"):
        Storage(url).probe()


def test_store_that_cannot_create_if_absent_is_refused_unless_there_is_one_writer() -> None:
    class Plain(MemoryFileSystem):
        protocol = "plain"

    fsspec.register_implementation("plain", Plain, clobber=True)
    url = f"plain://{uuid.uuid4().hex}"
    with pytest.raises(StorageUnavailableError, match="plain is not known"):
        Storage(url)
    Storage(url, single_writer=True).probe()


def test_unknown_kind_of_store_is_refused_by_name() -> None:
    with pytest.raises(StorageUnavailableError, match="nosuch://bucket/job"):
        Storage("nosuch://bucket/job")


def test_store_that_hangs_is_given_up_at_the_deadline(stuck_url: str) -> None:
    Storage(stuck_url).probe()
    storage = Storage(stuck_url, deadline_s=0.2)
    StuckFileSystem.stuck.set()
    for call in (
        lambda: storage.read_bytes("x"),
        lambda: storage.write_bytes("x", b"x"),
        storage.probe,
    ):
        began_s = time.monotonic()
        with pytest.raises(StorageUnavailableError, match=r"no answer in 0.2 s") as caught:
            call()
        assert time.monotonic() - began_s < DEADLINE_S / 2
        assert stuck_url in str(caught.value)
        assert not caught.value.lasting


def test_store_that_never_answers_costs_no_thread_per_try_for_ever(stuck_url: str) -> None:
    storage = Storage(stuck_url, deadline_s=0.01)
    StuckFileSystem.stuck.set()
    for _ in range(MAX_HUNG_CALLS):
        with pytest.raises(StorageUnavailableError, match="no answer in"):
            storage.read_bytes("x")
    num_threads = threading.active_count()
    # Another job's, too: it is the same store.
    for _ in range(3):
        with pytest.raises(StorageUnavailableError, match=r"16 calls to .* have not come back"):
            Storage(stuck_url).read_bytes("x")
    assert threading.active_count() == num_threads
    StuckFileSystem.stuck.clear()
    StuckFileSystem.let_go.set()
    end_s = time.monotonic() + DEADLINE_S
    while num_hung(store_of(stuck_url)) and time.monotonic() < end_s:
        time.sleep(0.002)
    storage.probe()


def test_urls_of_one_server_are_one_store() -> None:
    assert store_of("s3://bucket/a/job") == store_of("s3://bucket/b") == "s3://bucket"
    assert store_of("/mnt/nfs/job") == "/mnt/nfs/job"
    assert store_of("file:///mnt/nfs/job") == "file:///mnt/nfs/job"


def test_closing_ends_a_call_that_hangs(stuck_url: str) -> None:
    storage = Storage(stuck_url, deadline_s=10 * DEADLINE_S)
    StuckFileSystem.stuck.set()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(storage.read_bytes, "x")
        storage.close()
        with pytest.raises(StorageUnavailableError, match="it was closed"):
            waiting.result(DEADLINE_S)


def test_quarantined_checkpoint_does_not_exist_but_its_bytes_do(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1, 2])
    storage = Storage(url)
    storage.quarantine_step(2)
    assert storage.committed_steps() == [1]
    assert storage.size("step-00000002.1/__0_0.distcp") > 0
    assert [entry.name for entry in storage.entries("quarantine")] == ["00000002.1.json"]
    storage.quarantine_step(2)
    # The step can be committed again, and the sweep leaves the evidence alone.
    commit_steps(url, tmp_path / "memory-2", [3])
    assert storage.size("step-00000002.1/__0_0.distcp") > 0


def test_deleting_a_checkpoint_leaves_no_trace(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1, 2])
    storage = Storage(url)
    storage.delete_step(1)
    assert storage.committed_steps() == [2]
    assert sorted(entry.name for entry in storage.entries("")) == ["commits", "step-00000002.1"]
    with pytest.raises(CorruptCheckpointError, match=r"commits/00000001.json is missing"):
        storage.read_commit(1)


def test_agent_side_never_imports_torch() -> None:
    program = (
        "import sys, checkpoint.upload.uploader, checkpoint.upload.commit;"
        "import checkpoint.storage.storage, checkpoint.stage.slotfile;"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_entries_of_new_folders_reach_the_disk_before_a_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the loss of power a commit record must not name a folder that is not there."""
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def flushed(handle: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def renamed(self: Path, target: Path) -> Path:
        order.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    writer = Storage(f"file://{tmp_path}/jobs/job-1").writer("step-4.1/rank-0", 4, 4)
    writer.write(0, memoryview(b"four"))
    writer.finish()
    before = order[: order.index("rename")]
    for folder in (tmp_path, tmp_path / "jobs", tmp_path / "jobs" / "job-1"):
        assert str(folder) in before
    assert order[-1] == str(tmp_path / "jobs" / "job-1" / "step-4.1")
