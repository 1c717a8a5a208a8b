"""Programs of the agent's that start here, because the standby process has imported torch.

A program is what `python -m MODULE` would be, less its imports: it has the arguments, the
environment and the standard streams that the agent gives it, and no descriptor of the
standby's. It is a child of the agent's, a subreaper, to whom it falls as the process
between it and the standby ends. So it outlives the standby, and the kernel kills it when
the agent ends.

What does not belong here: which programs there are.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from diagnostics.children import die_with

_GO = b"+"
_PID_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run, and for whom."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    parent: int
    """Pid of the agent."""


def start(program: Program, streams: Sequence[int]) -> int:
    """Run a program with these descriptors as standard input, output and error; its pid.

    It is in our process group, until the agent gives it one of its own.

    Raises:
        OSError: it could not be forked.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        between = os.fork()
        if between == 0:
            _leave_child(program, streams, ours, theirs)
        _, status = os.waitpid(between, 0)
        code = os.waitstatus_to_exitcode(status)
        if code > 0:
            raise OSError(code, os.strerror(code))
        pid = int(ours.recv(_PID_BYTES, socket.MSG_DONTWAIT))
        # Its parent is the agent by now.
        ours.send(_GO)
    return pid


def close_descriptors(keep: Collection[int]) -> None:
    """Close all but these."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) in keep:
            continue
        # The listing's own descriptor is closed already.
        try:
            os.close(int(name))
        except OSError:
            continue


def log_to(path: Path) -> None:
    """Have this process write its output and its errors to the end of a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def flush_streams() -> None:
    """Write what was printed; a full disk must not change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue


def _leave_child(
    program: Program, streams: Sequence[int], ours: socket.socket, theirs: socket.socket
) -> NoReturn:
    """The whole life of the process between: fork the program, say its pid, end."""
    code = 1
    try:
        pid = os.fork()
        if pid == 0:
            ours.close()
            _become(program, streams, theirs)
        theirs.send(str(pid).encode())
        code = 0
    except OSError as error:
        code = error.errno or 1
    finally:
        os._exit(code)


def _become(program: Program, streams: Sequence[int], gate: socket.socket) -> NoReturn:
    """The rest of the program's life."""
    code = 1
    try:
        if gate.recv(1) == _GO:
            die_with(program.parent)
            _enter(program, streams)
            runpy.run_module(program.module, run_name="__main__", alter_sys=True)
            code = 0
        else:
            # The standby is dead, and nobody was told of us: be found as an orphan.
            os.setpgid(0, 0)
    except SystemExit as exit_request:
        code = _exit_code(exit_request)
    # The last frame of the process: whatever was raised must end here.
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        flush_streams()
        # Not sys.exit: clean-up handlers of the standby are not the program's.
        os._exit(code)


def _enter(program: Program, streams: Sequence[int]) -> None:
    """Be as a process is that has just been started."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    close_descriptors({0, 1, 2})
    os.environ.clear()
    os.environ.update(program.environment)
    sys.argv = [program.module, *program.arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Python's own generator has a new seed after every fork; numpy's has the standby's.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _exit_code(request: SystemExit) -> int:
    """As the interpreter has it."""
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    sys.stderr.write(f"{request.code}\n")
    return 1
