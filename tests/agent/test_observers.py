"""Parts that only look may fail: the agent keeps its workers, counts it and starts them again."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from controller.agent import mistakes as mistakes_module
from controller.agent.mistakes import LOG_PERIOD_S, Mistakes, keep_running
from controller.agent.observe import host as host_module
from controller.agent.observe.host import KernelLog, read_host
from controller.agent.observe.metrics.host import Folders
from outlast.blackbox import Reader, Writer


def test_observer_that_fails_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistakes_module, "_RESTART_FIRST_S", 0.001)
    mistakes = Mistakes()
    tries = 0

    async def run() -> None:
        works = asyncio.Event()

        async def observe() -> None:
            nonlocal tries
            tries += 1
            if tries < 4:
                raise OSError(errno.ESTALE, "Stale file handle")
            works.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(keep_running("host", observe, mistakes))
        async with asyncio.timeout(60):
            await works.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(run())
    assert mistakes.counts == {"host": 3}


def test_one_mistake_again_and_again_is_one_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    mistakes = Mistakes(lambda: now_s)
    with caplog.at_level(logging.ERROR):
        for _ in range(300):
            mistakes.note("stall_watch", "n0", ValueError("no"))
        now_s = LOG_PERIOD_S
        mistakes.note("stall_watch", "n0", ValueError("no"))
    assert mistakes.counts == {"stall_watch": 301}
    assert len(caplog.records) == 2
    assert "301 so far" in caplog.text


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOENT])
def test_folder_on_a_failed_disk_is_left_out_and_the_others_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folders = Folders(
        state_dir=tmp_path / "state", memory_dir=tmp_path / "memory", data_dir=tmp_path / "data"
    )
    for folder in (folders.state_dir, folders.memory_dir, folders.data_dir):
        folder.mkdir()
    ask = shutil.disk_usage

    def fails(path: Path) -> object:
        if path == folders.data_dir:
            raise OSError(number, os.strerror(number), str(path))
        return ask(path)

    monkeypatch.setattr(host_module.shutil, "disk_usage", fails)
    assert read_host(Path("/"), folders, []).disks_free.keys() == {"state", "memory"}


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EAGAIN])
def test_kernel_log_that_cannot_be_read_any_more_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(b"")
    log = KernelLog(path)
    # Lines before were overwritten.
    numbers = iter([errno.EPIPE, number])

    def read(handle: int, size: int) -> bytes:
        code = next(numbers, None)
        assert code is not None, "it is asked again at the next look"
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "read", read)
    assert log.new_lines() == []
    monkeypatch.undo()
    log.close()


def test_black_box_without_room_is_an_error_with_its_path_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank.blackbox"

    def full(handle: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=f"black box {path}: no room for its") as raised:
            Writer(path, rank=0, world_size=1, attempt=1)
    assert raised.value.errno == errno.ENOSPC
    Writer(path, rank=0, world_size=1, attempt=1).close()
    # All of it is on the disk: nothing is left to be found when a page is first written.
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    Reader(path).close()
