"""Makes system calls of the agent fail, one place at a time.

Every function of Python's own that may enter the kernel is wrapped: those of `os`, files,
sockets, locks, mappings, epoll, new processes and threads. Nothing lists the calls that the
agent makes: a place is a call together with the two innermost functions of ours that led to
it, and a pass in which nothing fails finds them all. What the main thread does is the test's.
"""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import mmap
import os
import select
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FrameType
from typing import Any

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EMFILE, errno.EAGAIN)
# Ours, all that a node's agent runs in its own process.
_PRODUCT = ("controller.", "checkpoint.", "diagnostics.", "outlast.")
# These only compute, or ask the kernel for what it cannot fail to give.
_PURE = """
    WCOREDUMP WEXITSTATUS WIFCONTINUED WIFEXITED WIFSIGNALED WIFSTOPPED WSTOPSIG WTERMSIG
    _exit _path_normpath abort cpu_count ctermid fork forkpty fspath getegid geteuid getgid
    getpgrp getpid getppid getuid major makedev minor register_at_fork strerror times umask uname
    unsetenv putenv urandom getrandom sched_yield waitstatus_to_exitcode get_inheritable
"""
# For these the kernel knows none of the five errors: ESRCH, ECHILD and EPERM at most.
_OF_PROCESSES = """
    getpgid getsid kill killpg wait wait3 wait4 waitid waitpid sched_getaffinity isatty
"""
_NEVER = frozenset((_PURE + _OF_PROCESSES).split())
# How asyncio wakes its own loop: where that fails, it has been woken already.
_WAKING = frozenset({"_read_from_self", "_write_to_self"})
_SOCKET_METHODS = """
    accept bind connect listen recv recv_into recvmsg recvmsg_into send sendall sendmsg shutdown
    setsockopt
"""

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A call, and the functions of ours that led to it, the innermost first."""

    call: str
    within: str

    def __str__(self) -> str:
        return f"{self.call} in {self.within}"


@dataclass(slots=True, kw_only=True)
class Fault:
    """What calls at a place do, and how many have done so."""

    number: int
    is_once: bool
    num_failed: int = 0


class Layer:
    """What fails now, and where calls were seen. One for a process: calls stay wrapped."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._wrapped: dict[int, Call] = {}
        self.seen: dict[Place, int] = {}
        self._faults: dict[Place, Fault] = {}

    def arm(self, faults: dict[Place, Fault]) -> None:
        """Let the next call at each place fail, or all until `disarm`."""
        self._faults = faults

    def disarm(self) -> None:
        self._faults = {}

    def is_ours(self) -> bool:
        """Whether the agent, not the test, makes the call that the caller stands in."""
        return threading.get_ident() != self._main and _within(sys._getframe(2)) is not None

    def passing(self, call: str) -> None:
        """Somebody is about to make this call; raises when it is to fail."""
        if threading.get_ident() == self._main:
            return
        within = _within(sys._getframe(2))
        if within is None:
            return
        place = Place(call, within)
        self.seen[place] = self.seen.get(place, 0) + 1
        fault = self._faults.get(place)
        if fault is None or (fault.is_once and fault.num_failed):
            return
        fault.num_failed += 1
        if call == "start_new_thread":
            raise RuntimeError("can't start new thread")
        raise OSError(fault.number, os.strerror(fault.number))

    def wrap(self) -> None:
        """Put the layer between Python and its system calls."""
        for module in (os, fcntl):
            for name, value in list(vars(module).items()):
                if isinstance(value, BuiltinFunctionType) and name not in _NEVER:
                    self._wrap(name, value)
        # What a module has taken under a name of its own.
        self._wrap("fork_exec", subprocess._fork_exec)  # type: ignore[attr-defined]
        self._wrap("start_new_thread", threading._start_new_thread)  # type: ignore[attr-defined]
        self._wrap("select", select.select)
        self._wrap("socketpair", socket._socket.socketpair)  # type: ignore[attr-defined]
        self._wrap("getaddrinfo", socket._socket.getaddrinfo)  # type: ignore[attr-defined]
        self._wrapped[id(io.open)] = self._opening(io.open)
        self._wrapped[id(mmap.mmap)] = self._mapping(mmap.mmap)
        self._replace()
        for name in _SOCKET_METHODS.split():
            self._wrap_method(socket.socket, name)
        self._wrap_method(socket.socket, "__init__")
        selectors.EpollSelector._selector_cls = self._epoll  # type: ignore[attr-defined]

    def _wrap(self, name: str, call: Call) -> None:
        def passing(*args: Any, **kwargs: Any) -> Any:
            self.passing(name)
            return call(*args, **kwargs)

        def closing(*args: Any, **kwargs: Any) -> None:
            # The kernel has let go of it, whatever it says.
            call(*args, **kwargs)
            self.passing(name)

        def asking(*args: Any, **kwargs: Any) -> bool:
            # It has no errors: whatever the kernel says is a no.
            try:
                self.passing(name)
            except OSError:
                return False
            return bool(call(*args, **kwargs))

        passing = {"close": closing, "access": asking}.get(name, passing)
        passing.__name__ = name
        self._wrapped[id(call)] = passing
        # shutil asks which calls take descriptors.
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if call in able:
                able.add(passing)

    def _replace(self) -> None:
        """Put the wrapped calls wherever a module has the others, but for the import system."""
        for name, module in list(sys.modules.items()):
            if name == "posix" or name.startswith(("importlib", "_frozen")):
                continue
            for attribute, value in list(getattr(module, "__dict__", {}).items()):
                # Only what is the very object: a key may be reused by nothing, they all live on.
                if callable(value) and id(value) in self._wrapped:
                    setattr(module, attribute, self._wrapped[id(value)])

    def _wrap_method(self, owner: type, name: str) -> None:
        call = getattr(owner, name)

        def passing(*args: Any, **kwargs: Any) -> Any:
            self.passing(name)
            return call(*args, **kwargs)

        def making(self_: Any, *args: Any, **kwargs: Any) -> None:
            # One of a descriptor that there is makes no call.
            if len(args) < 4 and kwargs.get("fileno") is None:
                self.passing("socket")
            call(self_, *args, **kwargs)

        if name == "__init__":
            passing = making

        setattr(owner, name, passing)

    def _opening(self, call: Call) -> Call:
        layer = self

        class File(io.FileIO):
            def read(self, size: int | None = -1, /) -> bytes:
                layer.passing("file.read")
                return super().read(-1 if size is None else size)

            def readall(self) -> bytes:
                layer.passing("file.read")
                return super().readall()

            def readinto(self, buffer: Any, /) -> int:
                layer.passing("file.read")
                return super().readinto(buffer)

            def write(self, data: Any, /) -> int:
                layer.passing("file.write")
                return super().write(data)

            def close(self) -> None:
                was_closed = self.closed
                super().close()
                if not was_closed:
                    layer.passing("file.close")

        def opened(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            if not self.is_ours():
                return call(file, mode, buffering, encoding, errors, newline, closefd, opener)
            self.passing("open")
            raw = File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            size = io.DEFAULT_BUFFER_SIZE if buffering < 2 else buffering
            buffer: Any
            if "+" in mode:
                buffer = io.BufferedRandom(raw, size)
            elif mode[0] == "r":
                buffer = io.BufferedReader(raw, size)
            else:
                buffer = io.BufferedWriter(raw, size)
            if "b" in mode:
                return buffer
            return io.TextIOWrapper(buffer, encoding, errors, newline, buffering == 1)

        return opened

    def _mapping(self, call: type[mmap.mmap]) -> type[mmap.mmap]:
        layer = self

        class Mapping(call):  # type: ignore[misc, valid-type]
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                layer.passing("mmap")
                return super().__new__(cls, *args, **kwargs)

        return Mapping

    def _epoll(self) -> Any:
        layer = self

        class Epoll:
            """`select.epoll`, which has no subclasses."""

            def __init__(self) -> None:
                self._epoll = select.epoll()
                self.fileno = self._epoll.fileno
                self.close = self._epoll.close
                self.poll = self._epoll.poll
                self.unregister = self._epoll.unregister

            def register(self, *args: Any) -> None:
                layer.passing("epoll_ctl")
                self._epoll.register(*args)

            def modify(self, *args: Any) -> None:
                layer.passing("epoll_ctl")
                self._epoll.modify(*args)

        return Epoll()


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_qualname}"


def _within(innermost: FrameType) -> str | None:
    """Which functions led to a call; None where none of ours did, or an import."""
    asyncio_name = ""
    for frame in _frames(innermost):
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith("importlib."):
            return None
        if module.startswith("asyncio.") and not asyncio_name:
            if frame.f_code.co_name in _WAKING:
                return None
            asyncio_name = _name(frame)
        if module.startswith(_PRODUCT):
            outer = (each for each in _frames(frame.f_back) if _is_outer(each, frame))
            names = [_name(frame), *(_name(each) for each in itertools.islice(outer, 1))]
            return " < ".join(names)
    # A transport of asyncio that works for us, and not the loop's own start and end.
    is_transport = "Transport" in asyncio_name
    return asyncio_name if is_transport else None


def _is_outer(frame: FrameType, inner: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(_PRODUCT) and frame.f_code is not inner.f_code
