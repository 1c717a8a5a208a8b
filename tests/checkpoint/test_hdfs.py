"""What is made of HDFS's answers; `make test-stores` asks a real one."""

from __future__ import annotations

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from checkpoint.storage.hdfs import create_by_rename, has_rename


class Answer:
    def __init__(self, boolean: bool) -> None:
        self._boolean = boolean

    def json(self) -> dict[str, bool]:
        return {"boolean": self._boolean}


class WebHdfs(MemoryFileSystem):
    """Files in memory, and renames as WebHDFS answers them. A test says how they go wrong."""

    protocol = ("webhdfs", "webHDFS")
    says = True
    does = True

    def _call(self, op: str, *, method: str, path: str, destination: str) -> Answer:
        assert (op, method) == ("RENAME", "put")
        if self.exists(destination):
            return Answer(False)
        if self.does:
            self.mv(path, destination)
        return Answer(self.says)


class NativeHdfs(MemoryFileSystem):
    """Files in memory, and renames as hdfs-native does them."""

    protocol = "hdfs"

    @property
    def client(self) -> NativeHdfs:
        return self

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        assert not overwrite
        if self.exists(target):
            raise RuntimeError("FileAlreadyExistsException")
        self.mv(source, target)


@pytest.fixture(params=[WebHdfs, NativeHdfs])
def fs(request: pytest.FixtureRequest) -> MemoryFileSystem:
    made = request.param(skip_instance_cache=True)
    made.store = {}
    made.pseudo_dirs = [""]
    assert isinstance(made, MemoryFileSystem)
    return made


def names(fs: MemoryFileSystem) -> list[str]:
    return sorted(path.rpartition("/")[2] for path in fs.find("/"))


def test_record_is_created_once(fs: MemoryFileSystem) -> None:
    assert has_rename(fs)
    assert create_by_rename(fs, "/commits/1.json", b"first")
    assert not create_by_rename(fs, "/commits/1.json", b"second")
    assert fs.cat_file("/commits/1.json") == b"first"
    assert names(fs) == ["1.json"]


def test_loser_of_a_race_leaves_the_winner_and_no_draft(
    fs: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = fs.pipe_file

    def lose(path: str, data: bytes) -> None:
        write(path, data)
        write("/commits/1.json", b"winner")

    monkeypatch.setattr(fs, "pipe_file", lose)
    assert not create_by_rename(fs, "/commits/1.json", b"loser")
    assert fs.cat_file("/commits/1.json") == b"winner"
    assert names(fs) == ["1.json"]


@pytest.mark.parametrize(
    ("says", "message"), [(True, "was said to work, but did nothing"), (False, "was refused")]
)
def test_rename_that_does_nothing_is_no_commit(says: bool, message: str) -> None:
    """fsspec's `mv` for WebHDFS drops the answer, so that this would look like success."""
    fs = WebHdfs(skip_instance_cache=True)
    fs.store, fs.pseudo_dirs, fs.does, fs.says = {}, [""], False, says
    with pytest.raises(OSError, match=message):
        create_by_rename(fs, "/commits/1.json", b"lost")
    assert names(fs) == []


def test_other_stores_have_no_rename_that_we_know() -> None:
    assert not has_rename(MemoryFileSystem())
