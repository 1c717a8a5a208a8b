"""Storage that is lost or lies: trouble in words, training goes on, and older checkpoints load."""

from __future__ import annotations

import errno
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from checkpoint.errors import CorruptCheckpointError
from checkpoint.storage.storage import Storage
from tests.checkpoint.helpers import (
    DEADLINE_S,
    News,
    commit_steps,
    load_alone,
    make_stager,
    make_tensors,
    same_bits,
    uploading,
    wait_for,
)

# What a store makes of a file's bytes, given its path; None keeps nothing.
Lie = Callable[[str, bytes], bytes | None]


class LyingFileSystem(MemoryFileSystem):
    """Files in memory; what a write does is what a test says."""

    protocol = ("lying", "memory")
    lie: Lie | None = None

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        kept = bytes(value) if self.lie is None else self.lie(path, bytes(value))
        if kept is not None:
            super().pipe_file(path, kept, **kwargs)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        # `pipe_file` comes this way, too.
        if mode == "rb" or "data" in kwargs:
            return super().open(path, mode, **kwargs)
        return _Draft(self, path)


class _Draft:
    """A file that is written when it is closed."""

    def __init__(self, fs: LyingFileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._content = b""

    def write(self, chunk: memoryview) -> None:
        self._content += bytes(chunk)

    def close(self) -> None:
        self._fs.pipe_file(self._path, self._content)


@pytest.fixture
def lying_url() -> Iterator[str]:
    fsspec.register_implementation("lying", LyingFileSystem, clobber=True)
    LyingFileSystem.lie = None
    yield f"lying://{uuid.uuid4().hex}/job-1"
    LyingFileSystem.lie = None


def tell(lie: Lie) -> None:
    LyingFileSystem.lie = staticmethod(lie)  # type: ignore[assignment]  # called on no instance


def be_honest() -> None:
    LyingFileSystem.lie = None


def refuse(error: OSError) -> Lie:
    def lie(path: str, content: bytes) -> bytes | None:
        raise error

    return lie


def only(part_of_path: str, change: Callable[[bytes], bytes | None]) -> Lie:
    """Change what is written where the path has this in it."""
    return lambda path, content: change(content) if part_of_path in path else content


def lose(content: bytes) -> None:
    """The store says that it has it, and has not."""


def cut(content: bytes) -> bytes:
    return content[:-1]


def flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 0x04]) + content[-8:]


def save_and_upload(url: str, memory: Path, step: int, timeout_s: float = 30.0) -> News:
    """One more step, saved and uploaded; training would go on whatever comes of it."""
    stager = make_stager(memory, make_tensors(step), attempt=step)
    with uploading(url, memory, keep=5, timeout_s=timeout_s) as (uploader, news):
        assert stager.save(step, {"step": step}, upload=True, common_step=step - 1)
        assert uploader.drain(DEADLINE_S)
        assert not stager.upload_busy
        assert stager.save(step + 1, {}, upload=False, common_step=step)
    stager.close()
    return news


def assert_loads(url: str, step: int) -> None:
    restored = make_tensors(99)
    assert load_alone(Storage(url), step, restored) == {"step": step}
    assert same_bits(restored, make_tensors(step))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "Connection reset"),
        (TimeoutError(), "no answer in"),
    ],
    ids=["quota", "full", "permission", "read-only", "reset", "timeout"],
)
def test_store_that_refuses_is_trouble_in_words_until_it_takes_again(
    lying_url: str, tmp_path: Path, error: OSError, words: str
) -> None:
    assert save_and_upload(lying_url, tmp_path / "1", 1).committed == [1]
    tell(refuse(error))
    news = save_and_upload(lying_url, tmp_path / "2", 2, timeout_s=3.0)
    assert news.committed == []
    [(step, stage, detail)] = news.trouble
    assert (step, stage) == (2, "upload")
    assert words in detail
    assert lying_url in detail
    assert_loads(lying_url, 1)
    be_honest()
    assert save_and_upload(lying_url, tmp_path / "3", 3).committed == [3]
    assert_loads(lying_url, 3)


@pytest.mark.parametrize("change", [lose, cut], ids=["lost", "cut"])
@pytest.mark.parametrize("file", [".distcp", "/parts/", "manifest.json", "/commits/0"])
def test_object_that_is_not_what_was_sent_makes_no_checkpoint(
    lying_url: str, tmp_path: Path, file: str, change: Callable[[bytes], bytes | None]
) -> None:
    """A rename or a write that silently does nothing, or stops short, is one of these."""
    assert save_and_upload(lying_url, tmp_path / "1", 1).committed == [1]
    tell(only(file, change))
    news = save_and_upload(lying_url, tmp_path / "2", 2, timeout_s=3.0)
    be_honest()
    assert news.committed == []
    assert (news.trouble[-1][0], news.trouble[-1][1]) == (2, "commit")
    storage = Storage(lying_url)
    # A record that is cut short exists; whoever meets it goes on to the one before.
    for step in storage.committed_steps():
        if step != 1:
            with pytest.raises(CorruptCheckpointError):
                storage.read_commit(step)
    assert_loads(lying_url, 1)
    assert save_and_upload(lying_url, tmp_path / "3", 3).committed == [3]
    assert_loads(lying_url, 3)


@pytest.mark.parametrize("file", [".distcp", ".metadata"])
def test_bit_that_flips_on_its_way_is_found_by_whoever_loads(
    lying_url: str, tmp_path: Path, file: str
) -> None:
    """Both are verified by their checksums whenever they are read."""
    assert save_and_upload(lying_url, tmp_path / "1", 1).committed == [1]
    tell(only(file, flip))
    assert save_and_upload(lying_url, tmp_path / "2", 2).committed == [2]
    be_honest()
    with pytest.raises(CorruptCheckpointError) as caught:
        assert_loads(lying_url, 2)
    assert file in str(caught.value)
    assert_loads(lying_url, 1)


def test_mount_that_turns_read_only_is_trouble_until_it_can_be_written(
    small_tmpfs: Callable[[int], Path], tmp_path: Path
) -> None:
    disk = small_tmpfs(4 << 20)
    url = f"file://{disk}/job-1"
    assert save_and_upload(url, tmp_path / "1", 1).committed == [1]
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    news = save_and_upload(url, tmp_path / "2", 2, timeout_s=3.0)
    [(step, stage, detail)] = news.trouble
    assert (step, stage, news.committed) == (2, "upload", [])
    assert "Read-only file system" in detail
    assert_loads(url, 1)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert save_and_upload(url, tmp_path / "3", 3).committed == [3]


def test_folder_deleted_while_a_part_is_awaited_is_trouble_and_the_next_step_is_stored(
    url: str, tmp_path: Path
) -> None:
    """Somebody deletes the job's folder: one of two ranks has uploaded, the other is late."""
    memory = tmp_path / "memory"
    commit_steps(url, tmp_path / "before", [1])
    stagers = [
        make_stager(memory, make_tensors(3, rank=rank, ranks=2), rank=rank, world_size=2)
        for rank in range(2)
    ]
    root = tmp_path / "store/job-1"
    record = root / "step-00000003.1/parts/rank-00000.json"
    with uploading(url, memory, local=(0, 1), savers=(0, 1), timeout_s=8.0) as (uploader, news):
        stagers[0].save(3, {}, upload=True, common_step=-1)
        wait_for(record.exists, "the part of rank 0")
        while root.exists():
            # Somebody may make a file there meanwhile.
            shutil.rmtree(root, ignore_errors=True)
        stagers[1].save(3, {}, upload=True, common_step=-1)
        assert uploader.drain(DEADLINE_S)
        assert news.committed == []
        assert [(step, stage) for step, stage, _ in news.trouble] == [(3, "commit")]
        assert "first missing: rank 0" in news.trouble[0][2]
        for stager in stagers:
            stager.save(4, {}, upload=True, common_step=3)
        assert uploader.drain(DEADLINE_S)
        assert news.committed == [4]
