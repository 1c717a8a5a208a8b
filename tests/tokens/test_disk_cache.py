"""The cache on a node's disk: within its bound, and never anything but what was written."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import OccupiedError
from outlast.remote.blocks import KeptFile, to_evict
from outlast.remote.disk import BlockFolder

# Of a checksum behind each file.
END = 8


def taken(folder: Path) -> int:
    """Bytes of everything but the count of them, and locks."""
    files = (each for each in folder.rglob("*") if each.is_file() and each.name != "usage")
    return sum(each.stat().st_size for each in files)


def age(folder: Path, name: str, seconds: float) -> None:
    stat = (folder / name).stat()
    os.utime(folder / name, (stat.st_atime - seconds, stat.st_mtime - seconds))


def test_what_is_written_is_read_and_nothing_else(tmp_path: Path) -> None:
    cache = BlockFolder(tmp_path, max_bytes=1000)
    cache.write("a/0", b"zero")
    assert cache.read("a/0") == b"zero"
    assert cache.read("a/1") is None
    assert (cache.has("a/0"), cache.has("a/1")) == (True, False)


@pytest.mark.parametrize("cut", [0, 3, 8, 11])
def test_a_file_that_was_cut_is_not_trusted_and_written_again(tmp_path: Path, cut: int) -> None:
    """As by a node that lost power before its disk had all of it."""
    cache = BlockFolder(tmp_path, max_bytes=1000)
    cache.write("a/0", b"zero")
    os.truncate(tmp_path / "a" / "0", cut)
    assert cache.read("a/0") is None
    assert not cache.has("a/0")
    cache.write("a/0", b"zero")
    assert cache.read("a/0") == b"zero"


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    cache = BlockFolder(tmp_path, max_bytes=1000)
    cache.write("a/0", b"zero")
    path = tmp_path / "a" / "0"
    path.write_bytes(b"nero" + path.read_bytes()[4:])
    assert cache.read("a/0") is None


def test_what_was_not_read_for_longest_makes_room(tmp_path: Path) -> None:
    cache = BlockFolder(tmp_path, max_bytes=4 * (100 + END))
    for number in range(4):
        cache.write(f"a/{number}", bytes(100))
        age(tmp_path, f"a/{number}", 100 - number)
    assert cache.read("a/0") is not None
    cache.write("a/4", bytes(100))
    # An eighth of the bound more is freed, so that not every write has to count.
    assert [each for each in range(5) if cache.has(f"a/{each}")] == [0, 3, 4]


@settings(max_examples=60, deadline=None)
@given(
    max_bytes=st.integers(0, 400),
    writes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 120)), max_size=30),
)
def test_the_bound_is_kept_whatever_is_written(
    max_bytes: int, writes: list[tuple[int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, written = Path(name), dict[int, bytes]()
        # Two processes side by side, as far as the files show.
        caches = [BlockFolder(folder, max_bytes=max_bytes) for _ in range(2)]
        for turn, (number, nbytes) in enumerate(writes):
            data = bytes([turn]) * nbytes
            caches[turn % 2].write(f"a/{number}", data)
            if nbytes + END <= max_bytes:
                written[number] = data
            assert taken(folder) <= max_bytes
        for number in range(10):
            assert caches[0].read(f"a/{number}") in (None, written.get(number))


def test_processes_side_by_side_keep_to_the_bound_and_read_whole_blocks(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from outlast.remote.disk import BlockFolder\n"
        "cache = BlockFolder(pathlib.Path(sys.argv[1]), max_bytes=20_000)\n"
        "for turn in range(300):\n"
        "    name = turn * 7 % 60\n"
        "    cache.write(f'a/{name}', bytes([name]) * 1000)\n"
        "    found = cache.read(f'a/{turn % 60}')\n"
        "    assert found in (None, bytes([turn % 60]) * 1000)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    running = [subprocess.Popen(command) for _ in range(3)]
    assert [each.wait(60) for each in running] == [0, 0, 0]
    assert taken(tmp_path) <= 20_000


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, time\n"
        "from outlast.remote.disk import BlockFolder\n"
        "def fill(file):\n"
        "    file.write(b'half'); file.flush(); print('now', flush=True); time.sleep(60)\n"
        "BlockFolder(pathlib.Path(sys.argv[1]), max_bytes=1000).whole('a/index', 8, fill)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writing:
        assert writing.stdout is not None
        assert writing.stdout.readline() == b"now\n"
        writing.send_signal(signal.SIGKILL)
    cache = BlockFolder(tmp_path, max_bytes=1000)
    assert not cache.has("a/index")
    assert cache.whole("a/index", 5, lambda file: written(file, b"whole")).read_bytes() == b"whole"
    (draft,) = tmp_path.glob("a/*.draft")
    age(tmp_path, f"a/{draft.name}", 7200)
    for number in range(12):
        cache.write(f"a/{number}", bytes(100))
    assert not draft.exists(), "drafts of the dead are deleted when files are counted"


def written(file: BinaryIO, data: bytes) -> None:
    file.write(data)


def test_a_whole_file_is_filled_by_one_of_those_that_want_it(tmp_path: Path) -> None:
    fills = []

    def fill(file: BinaryIO) -> None:
        fills.append(file.write(b"index"))

    caches = [BlockFolder(tmp_path, max_bytes=1000) for _ in range(4)]
    threads = [threading.Thread(target=each.whole, args=("a/i", 5, fill)) for each in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fills == [5]


def test_a_whole_file_is_not_waited_for_while_another_process_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (BlockFolder(tmp_path, max_bytes=1000) for _ in range(2))
    (tmp_path / "a").mkdir()
    with open(tmp_path / "a" / "i.lock", "w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)

        def other_fills_it_meanwhile(seconds: float) -> None:
            monkeypatch.undo()
            fcntl.flock(looking, fcntl.LOCK_UN)
            first.whole("a/i", 5, lambda file: written(file, b"index"))

        monkeypatch.setattr("outlast.remote.disk.LOCK_WAIT_S", 5.0)
        monkeypatch.setattr("outlast.remote.disk.time.sleep", other_fills_it_meanwhile)
        path = second.whole("a/i", 5, lambda file: written(file, b"again"))
    assert path.read_bytes() == b"index"


def test_a_whole_file_in_use_stays_and_then_makes_room(tmp_path: Path) -> None:
    using, writing = (BlockFolder(tmp_path, max_bytes=1000) for _ in range(2))
    path = using.whole("a/i", 300, lambda file: written(file, bytes(300)))
    age(tmp_path, "a/i", 100)
    for number in range(20):
        writing.write(f"a/{number}", bytes(100))
    assert path.exists()
    assert sum(each.stat().st_size for each in tmp_path.glob("a/*")) <= 1000
    using.close()
    for number in range(20, 40):
        writing.write(f"a/{number}", bytes(100))
    assert not path.exists()


def test_a_whole_file_that_is_taken_as_files_are_counted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, writing = (BlockFolder(tmp_path, max_bytes=1000) for _ in range(3))
    path = first.whole("a/i", 300, lambda file: written(file, bytes(300)))
    first.close()
    age(tmp_path, "a/i", 100)

    def taken_meanwhile(kept: list[KeptFile], *, limit_bytes: int) -> list[KeptFile]:
        found = to_evict(kept, limit_bytes=limit_bytes)
        if str(path) in [each.name for each in found]:
            monkeypatch.undo()
            second.whole("a/i", 300, lambda file: None)
        return found

    monkeypatch.setattr("outlast.remote.disk.to_evict", taken_meanwhile)
    for number in range(20):
        writing.write(f"a/{number}", bytes(100))
    assert path.stat().st_size == 300
    assert sum(each.stat().st_size for each in tmp_path.glob("a/*")) <= 1000


def test_a_process_that_does_not_end_filling_a_file_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.remote.disk.LOCK_WAIT_S", 0.1)
    (tmp_path / "a").mkdir()
    with open(tmp_path / "a" / "i.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"i\.lock: another process of this node"):
            BlockFolder(tmp_path, max_bytes=1000).whole("a/i", 5, lambda file: None)


def test_a_whole_file_without_room_is_refused(tmp_path: Path) -> None:
    cache = BlockFolder(tmp_path, max_bytes=1000)
    with pytest.raises(ValueError, match=r"1,001 bytes.*data.cache_bytes is 1,000; allowed: 1,001"):
        cache.whole("a/i", 1001, lambda file: None)


def test_a_disk_that_is_almost_full_is_left_alone_and_that_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimpleNamespace(f_bavail=4, f_blocks=100, f_frsize=1000)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    cache = BlockFolder(tmp_path, max_bytes=1000)
    for number in range(3):
        cache.write(f"a/{number}", b"zero")
        assert cache.read(f"a/{number}") is None
    assert cache.is_unwritable
    assert [record.message for record in caplog.records] == [
        f"remote data is read without its cache: no room for 12 bytes in {tmp_path}: "
        "data.cache_bytes is 1,000, and a twentieth of the disk stays free"
    ]
    disk.f_bavail = 50
    cache.write("a/0", b"zero")
    assert cache.read("a/0") == b"zero"
    assert not cache.is_unwritable


def test_a_whole_file_on_a_full_disk_is_no_fault_of_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_bavail=4, f_blocks=100, f_frsize=1000)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    cache = BlockFolder(tmp_path, max_bytes=1000)
    with pytest.raises(OccupiedError, match=rf"no room for 5 bytes of i in {tmp_path}"):
        cache.whole("a/i", 5, lambda file: None)


def test_a_folder_that_cannot_be_written_costs_the_cache_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = BlockFolder(tmp_path / "file", max_bytes=1000)
    for _ in range(2):
        cache.write("a/0", b"zero")
        assert cache.read("a/0") is None
    assert [record.message for record in caplog.records] == [
        f"remote data is read without its cache: [Errno 17] File exists: '{tmp_path}/file'"
    ]
