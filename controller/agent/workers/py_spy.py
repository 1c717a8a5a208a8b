"""py-spy, which reads where a process is from outside, as a program that is run and awaited."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from typing import IO

from controller.agent.workers.processes import wait_gone

MISSING = "py-spy is not installed on this node (pip install 'outlast[stacks]')"


def find() -> str | None:
    """py-spy, of this Python's installation or of the path."""
    return shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")


async def run(*command: str, pass_fds: Sequence[int] = ()) -> tuple[int, str, str]:
    """Exit code of a command, what it prints, and the first line of its errors.

    Exit code 1 and why, when there is no memory or file descriptor for it.
    """
    try:
        return await _output_of(command, pass_fds)
    except OSError as error:
        return 1, "", str(error)


def memory_file(name: str) -> IO[bytes]:
    """A file that nobody else can open by a name."""
    handle = os.memfd_create(name)
    try:
        return open(handle, "w+b")
    except BaseException:
        os.close(handle)
        raise


async def _output_of(command: Sequence[str], pass_fds: Sequence[int]) -> tuple[int, str, str]:
    # Files in memory: pipes would have to be emptied meanwhile, and asyncio's own way to wait
    # for a process takes a thread, which there may not be.
    with memory_file("py-spy-output") as output, memory_file("py-spy-error") as error:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=error, pass_fds=pass_fds
        )
        try:
            await wait_gone(process.pid)
        finally:
            if process.poll() is None:
                process.kill()
                await wait_gone(process.pid)
            code = process.wait()
        output.seek(0)
        error.seek(0)
        text = output.read().decode(errors="replace")
        return code, text, _first_line(error.read())


def _first_line(error: bytes) -> str:
    return error.decode(errors="replace").partition("\n")[0]
