"""Logs lose their older part while their worker writes on, and readers go on where they were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller.agent.observe import log_files
from controller.agent.observe.log_files import read_log, trim
from tests.agent.test_logs import answers

MIB = 1 << 20
LINE_BYTES = 64


def line(number: int) -> bytes:
    return f"line {number}".encode().ljust(LINE_BYTES - 1) + b"\n"


def written(path: Path, first: int, last: int) -> None:
    with path.open("ab") as file:
        file.writelines(line(number) for number in range(first, last))


def whole(path: Path, offset: int = 0) -> bytes:
    parts = []
    while True:
        offset, data = read_log(path, offset, 10_000)
        if not data:
            return b"".join(parts)
        parts.append(data)
        offset += len(data)


@pytest.fixture(params=["holes", "no holes"])
def log(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of 4 MiB, on a file system that has holes or has none."""
    if request.param == "no holes":

        def refuse(*_: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(log_files, "_punch", refuse)
    path = tmp_path / "job" / "a1" / "rank-00000.log"
    path.parent.mkdir(parents=True)
    written(path, 0, 4 * MIB // LINE_BYTES)
    return path


def test_a_log_that_is_short_enough_stays(log: Path) -> None:
    before = log.read_bytes()
    assert trim(log, 4 * MIB) == 0
    assert log.read_bytes() == before


def test_the_newest_half_of_the_limit_is_left_below_a_line_that_says_so(log: Path) -> None:
    assert trim(log, MIB) > 3 * MIB
    first, *rest = whole(log).splitlines(keepends=True)
    assert first.startswith(b"[outlast] older output deleted: 3 MiB up to here; the log of a rank")
    last = 4 * MIB // LINE_BYTES
    assert rest == [line(number) for number in range(last - len(rest), last)]
    assert 0 <= MIB // 2 - len(rest) * LINE_BYTES < 2 * LINE_BYTES
    assert log.stat().st_blocks * 512 < MIB
    # There is nothing more to delete.
    assert trim(log, MIB) == 0


def test_a_log_is_deleted_from_again_and_again(log: Path) -> None:
    first = 4 * MIB // LINE_BYTES
    for _ in range(5):
        assert trim(log, MIB) > 0
        written(log, first, first + MIB // LINE_BYTES)
        first += MIB // LINE_BYTES
        assert whole(log).endswith(line(first - 2) + line(first - 1))
        assert whole(log).count(b"[outlast]") == 1
        assert log.stat().st_blocks * 512 < 2 * MIB


def test_the_end_of_a_log_is_sent_without_what_was_deleted(log: Path) -> None:
    trim(log, MIB)
    data = b"".join(chunk.data for chunk in answers(log.parents[2], tail_bytes=3 * MIB))
    assert data == whole(log)
    assert b"\0" not in data


def test_one_who_follows_gets_each_line_once_where_there_are_holes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    written(log, 0, MIB // LINE_BYTES)
    got, offset = b"", 0
    for number in range(1, 6):
        while True:
            offset, data = read_log(log, offset, 100_000)
            if not data:
                break
            got, offset = got + data, offset + len(data)
        trim(log, MIB // 2)
        written(log, number * MIB // LINE_BYTES, (number + 1) * MIB // LINE_BYTES)
    assert got == b"".join(line(number) for number in range(5 * MIB // LINE_BYTES))


def test_a_worker_writes_on_undisturbed(log: Path) -> None:
    script = (
        "import os\n"
        "for number in range(200_000):\n"
        "    assert os.write(1, f'{number:063d}\\n'.encode()) == 64\n"
        "os.write(2, b'.')\n"
        "os.read(0, 1)\n"
        "assert os.write(1, b'the end') == 7\n"
    )
    pipe = subprocess.PIPE
    with (
        log.open("ab") as out,
        subprocess.Popen(
            [sys.executable, "-c", script], stdin=pipe, stdout=out, stderr=pipe, bufsize=0
        ) as worker,
    ):
        assert worker.stdin is not None
        assert worker.stderr is not None
        os.set_blocking(worker.stderr.fileno(), False)
        trims = 0
        while worker.stderr.read(1) is None:
            trims += trim(log, MIB) > 0
        # Without holes, what comes in the middle of a trim may be lost.
        worker.stdin.write(b".")
        assert worker.wait() == 0
    assert trims > 1
    assert whole(log).endswith(b"the end")


def test_nothing_is_there_to_read_in_a_log_that_is_gone(tmp_path: Path) -> None:
    assert read_log(tmp_path / "gone", 7, 10) == (7, b"")
