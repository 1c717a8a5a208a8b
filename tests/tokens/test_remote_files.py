"""Files of a store, read in blocks: what is asked of it, what fails, and what has changed."""

from __future__ import annotations

import errno
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.errors import StorageTimeoutError, StorageUnavailableError
from checkpoint.storage.backend import FileVersion
from checkpoint.storage.hung import MAX_HUNG_CALLS
from checkpoint.storage.reading import FileStore
from outlast.errors import SettingError
from outlast.remote.fetching import NUM_FETCHING, retry_for
from outlast.remote.files import RemoteFile, RemoteFiles
from tests.tokens import remote
from tests.tokens.remote import BLOCK_BYTES, Requests

CONTENT = b"".join(hashlib.sha256(bytes([each])).digest() for each in range(200))
NUM_BLOCKS = -(-len(CONTENT) // BLOCK_BYTES)


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "train.bin").write_bytes(CONTENT)
    return f"{remote.upload(tmp_path / 'from')}/train.bin"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    with remote.watched(monkeypatch) as found:
        yield found


def opened(files: RemoteFiles, url: str) -> RemoteFile:
    file = files.open(url)
    assert file is not None
    return file


@settings(max_examples=50, deadline=None)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 7000), st.integers(0, 3000)), max_size=8),
    max_bytes=st.sampled_from([0, 2000, 1 << 20]),
)
def test_any_ranges_are_the_bytes_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[tuple[int, int]], max_bytes: int
) -> None:
    """Whether the cache has room for none of it, for a block, or for all."""
    folder = tmp_path_factory.mktemp("any")
    (folder / "train.bin").write_bytes(CONTENT)
    files = remote.files(folder / "cache", max_bytes=max_bytes)
    file = opened(files, f"file://{folder}/train.bin")
    spans = [(start, start + length) for start, length in ranges]
    file.prefetch(spans)
    assert [file.read(*each) for each in spans] == [CONTENT[slice(*each)] for each in spans]
    apart = [(start, min(end, len(CONTENT))) for start, end in spans if start < len(CONTENT)]
    assert file.read_ranges(apart) == [CONTENT[slice(*each)] for each in apart]
    files.close()


def test_each_block_is_fetched_once_for_all_processes_and_attempts(
    tmp_path: Path, url: str, requests: Requests
) -> None:
    for _ in range(3):
        file = opened(remote.files(tmp_path / "cache"), url)
        for start in range(0, len(CONTENT), 100):
            assert file.read(start, start + 100) == CONTENT[start : start + 100]
    assert requests.reads == {"train.bin": NUM_BLOCKS}


def test_what_was_prefetched_is_not_waited_for_again(
    tmp_path: Path, url: str, requests: Requests
) -> None:
    file = opened(remote.files(tmp_path / "cache"), url)
    file.prefetch([(0, len(CONTENT))])
    assert file.read(0, len(CONTENT)) == CONTENT
    file.prefetch([(0, len(CONTENT))])
    assert file.read(0, len(CONTENT)) == CONTENT
    assert requests.reads == {"train.bin": NUM_BLOCKS}


def test_a_file_that_was_opened_anew_has_nothing_of_the_old_one(tmp_path: Path, url: str) -> None:
    files = remote.files(tmp_path / "cache")
    assert opened(files, url).read(0, 5000) == CONTENT[:5000]
    other = CONTENT[::-1]
    remote.put(url, other)
    assert opened(files, url).read(0, 5000) == other[:5000]


def test_a_file_that_changes_while_it_is_read_is_an_error_and_never_mixed(
    tmp_path: Path, url: str
) -> None:
    file = opened(remote.files(tmp_path / "cache"), url)
    assert file.read(0, 100) == CONTENT[:100]
    remote.put(url, CONTENT[::-1])
    # What is kept is of the file that was opened.
    assert file.read(100, 200) == CONTENT[100:200]
    for start in (BLOCK_BYTES, 2 * BLOCK_BYTES):
        with pytest.raises(SettingError, match=rf"{url} has changed since .*; put back what"):
            file.read(start, start + 10)
    with pytest.raises(SettingError, match="has changed"):
        file.read_ranges([(0, 10)])
    with pytest.raises(SettingError, match="has changed"):
        file.whole()


def test_a_file_that_is_deleted_is_said_to_be_gone(tmp_path: Path, url: str) -> None:
    path = tmp_path / "from" / "train.bin"
    file = opened(remote.files(tmp_path / "cache"), f"file://{path}")
    path.unlink()
    with pytest.raises(SettingError, match=r"has changed .* it is gone"):
        file.read(0, 10)


def test_a_store_that_fails_for_a_while_is_asked_again(
    tmp_path: Path, url: str, requests: Requests
) -> None:
    file = opened(remote.files(tmp_path / "cache"), url)
    requests.failing = [OSError(errno.ECONNRESET, "reset"), TimeoutError("slow")]
    assert file.read(0, 10) == CONTENT[:10]
    assert requests.reads == {"train.bin": 3}


def test_a_store_that_fails_for_too_long_is_a_storage_error_with_its_url(
    tmp_path: Path, url: str, requests: Requests
) -> None:
    file = opened(remote.files(tmp_path / "cache", patience_s=1.5), url)
    requests.failing = [OSError(errno.ECONNRESET, "reset by peer")] * 99
    folder = url.rpartition("/")[0]
    with pytest.raises(
        StorageUnavailableError,
        match=rf"^storage {folder}: cannot read train.bin: .*reset by peer; asked \d times",
    ):
        file.read(0, 10)


def test_what_will_not_pass_is_not_tried_again(
    tmp_path: Path, url: str, requests: Requests
) -> None:
    file = opened(remote.files(tmp_path / "cache"), url)
    requests.failing = [PermissionError(errno.EACCES, "denied")] * 99
    with pytest.raises(StorageUnavailableError, match="denied"):
        file.read(0, 10)
    assert requests.reads == {"train.bin": 1}


def test_calls_that_hang_are_tried_again_although_no_more_are_made_meanwhile() -> None:
    """As many as are made at once may hang twice before a store gets no more calls."""
    assert 2 * NUM_FETCHING <= MAX_HUNG_CALLS
    failing = [StorageTimeoutError("hangs"), StorageTimeoutError("too many hang", lasting=True)]

    def work() -> str:
        if failing:
            raise failing.pop(0)
        return "bytes"

    assert retry_for(work, patience_s=20.0) == "bytes"


@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_store_that_hangs_is_a_storage_error_and_no_problem_of_the_spec(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, is_lasting: bool
) -> None:
    """And no subclass of it: exit rules know it by name. Also where the first failure is final."""

    def version(self: FileStore, name: str) -> FileVersion:
        raise StorageTimeoutError("16 calls have not come back", lasting=is_lasting)

    file = opened(remote.files(tmp_path / "cache", patience_s=0.0), url)
    monkeypatch.setattr(FileStore, "version", version)
    for work in (
        partial(remote.files(tmp_path / "cache", patience_s=0.0).open, url),
        partial(file.read, 0, 10),
    ):
        with pytest.raises(StorageUnavailableError, match="16 calls have not come back") as found:
            work()
        assert type(found.value) is StorageUnavailableError
        assert not found.value.lasting


def test_a_file_without_a_mark_is_never_taken_from_an_older_ones_blocks(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = FileStore.version
    monkeypatch.setattr(
        FileStore, "version", lambda self, name: replace(version(self, name), mark="")
    )
    files = remote.files(tmp_path / "cache")
    file = opened(files, url)
    assert (file.read(0, 10), file.whole().read_bytes()) == (CONTENT[:10], CONTENT)
    remote.put(url, CONTENT[::-1])
    file = opened(files, url)
    assert (file.read(0, 10), file.whole().read_bytes()) == (CONTENT[::-1][:10], CONTENT[::-1])


def test_nothing_is_prefetched_while_the_cache_keeps_no_blocks(
    tmp_path: Path, url: str, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_bavail=4, f_blocks=100, f_frsize=1000)
    monkeypatch.setattr("outlast.remote.disk.os.statvfs", lambda path: disk)
    files = remote.files(tmp_path / "cache")
    file = opened(files, url)
    for _ in range(2):
        file.prefetch([(0, 10)])
        file.read(0, 10)
    file.prefetch([(BLOCK_BYTES, len(CONTENT))])
    remote.wait_for(files)
    # The first prefetch and its read may be one request.
    assert requests.reads["train.bin"] in (2, 3)


def test_a_prefetch_that_failed_is_tried_again_by_the_read(
    tmp_path: Path, url: str, requests: Requests
) -> None:
    files = remote.files(tmp_path / "cache")
    file = opened(files, url)
    requests.failing = [PermissionError(errno.EACCES, "denied")]
    file.prefetch([(0, 10)])
    remote.wait_for(files)
    assert requests.reads == {"train.bin": 1}
    assert file.read(0, 10) == CONTENT[:10]


def test_a_whole_file_is_fetched_once_for_the_node(
    tmp_path: Path, url: str, requests: Requests
) -> None:
    for _ in range(2):
        file = opened(remote.files(tmp_path / "cache"), url)
        assert file.whole().read_bytes() == CONTENT
    assert requests.reads == {"train.bin": 1}


def test_a_whole_file_without_room_names_the_setting(tmp_path: Path, url: str) -> None:
    file = opened(remote.files(tmp_path / "cache", max_bytes=2000), url)
    with pytest.raises(SettingError, match=rf"{url} has 6,400 bytes.*data.cache_bytes is 2,000"):
        file.whole()


def test_without_a_cache_everything_is_read_from_the_store(url: str) -> None:
    file = opened(remote.files(None), url)
    file.prefetch([(0, 100)])
    assert file.read(1000, 5000) == CONTENT[1000:5000]
    assert file.read_ranges([(0, 3), (90, 99)]) == [CONTENT[:3], CONTENT[90:99]]


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    files = remote.files(tmp_path / "cache")
    assert files.open("memory://no-such-bucket/train.bin") is None
    assert files.open(f"file://{tmp_path}/nowhere/train.bin") is None
    (tmp_path / "folder").mkdir()
    assert files.open(f"memory://no-such-bucket/{tmp_path.name}") is None


def test_a_store_without_its_package_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match=r"need the package gcsfs.*pip install gcsfs"):
        remote.files(tmp_path).open("gs://bucket/train.bin")
