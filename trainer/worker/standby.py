"""The pre-imported process that workers are forked from.

Importing torch and the trainer costs seconds; forking a process
that has imported it costs milliseconds. The node agent starts one standby
process per node and asks it, over a socket pair, for every worker:

    agent -> standby  {"op": "fork", "key": K, "contract": {...}, "cgroup": G}
                      {"op": "adopt", "key": K, "pid": P}   (a child of a standby that died)
                      {"op": "run", "key": K, "program": {...}}   (with three descriptors)
                      {"op": "exit"}
    standby -> agent  {"event": "ready", "pid": P, "left_out": {MODULE: WHY}, "is_installed": B}
                      {"event": "forked", "key": K, "pid": P, "at_ns": T}
                      {"event": "started", "key": K, "pid": P, "at_ns": T}   (a program)
                      {"event": "refused", "key": K, "detail": D}   (it can never fork again)
                      {"event": "not_started", "key": K, "detail": D}   (a program)
                      {"event": "exited", "key": K, "pid": P, "status": W}

A fork copies only the calling thread: a child that inherits a locked mutex or
the memory of a thread pool without its threads hangs at its first parallel
operation. So this process runs no tensor operation, never imports grpc, has
single-threaded maths libraries (the agent sets the environment) and checks that
it has exactly one thread before each fork.

When the agent dies, the control socket ends: the standby kills its workers and
exits, so that nothing is orphaned. When the standby dies, workers go on.

The agent's checks of this node need torch as well, so they are forked here, too
(`programs`); they are the agent's own children.

What does not belong here: anything that a worker does after it is forked.
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outlast import private
from outlast.clock import node_time_ns, node_time_s
from outlast.crashpoints import CrashPoint, reach
from outlast.script import entry as script_entry
from outlast.startup import check_packages
from outlast.worker_contract import (
    STOP_SIGNAL,
    WORKER_MARK,
    ErrorField,
    WorkerContract,
    WorkerExitCode,
)
from trainer.worker import programs
from trainer.worker.hugepages import gather_pages
from trainer.worker.preloading import Preloaded, preload
from trainer.worker.standby_options import Options, parse

# Input, output and error of a program.
_NUM_STREAMS = 3
Entry = Callable[[WorkerContract], int]


def main(arguments: list[str] | None = None) -> int:
    """Import, report ready, then fork and reap until the agent goes."""
    options = parse(arguments)
    check_packages(options.packages)
    # Nothing that is imported is garbage: looking for it takes a tenth of the time.
    gc.disable()
    for module in options.preload:
        importlib.import_module(module)
    done = _preload_extras(options)
    module_name, _, function_name = options.entry.partition(":")
    entry = _no_entry
    if module_name:
        entry = getattr(importlib.import_module(module_name), function_name)
    # Ctrl-C goes to a whole foreground group; the agent decides what stops when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Objects that live for ever leave the collector's sight: its header writes
    # would copy shared pages in every child. Collecting first takes 0.15 s and frees no page.
    gc.freeze()
    gc.enable()
    gather_pages()
    control = socket.socket(fileno=options.control_fd)
    control.set_inheritable(False)
    try:
        Standby(control, options.rendezvous_fd, entry, done).serve()
    except _ScriptForked as forked:
        contract = forked.contract
    else:
        # Modules of scripts put away what they keep. Its agent waits for its end: taking down all
        # that was imported would cost another 0.3 s of a core.
        atexit._run_exitfuncs()
        programs.flush_streams()
        os._exit(0)
    _say_left_out(contract, done.left_out)
    # Out of all frames of the standby: a script ends as a program does, handlers and threads
    # included, and no exception of ours is the context of its own.
    return script_entry.run(contract, {*options.packages, module_name.partition(".")[0]})


def _preload_extras(options: Options) -> Preloaded:
    """Import what the job's script wants.

    Does not return where a module has spoiled the process: it begins anew without that.
    """
    done = preload(options.extras, options.folders, options.left_out, options.packages)
    if done.spoiled_by:
        again = [*sys.orig_argv, "--left-out", json.dumps(done.left_out)]
        os.execv(sys.executable, [sys.executable, *again[1:]])
    return done


def _no_entry(contract: WorkerContract) -> int:
    raise ValueError("this interpreter is a script's: it runs no workers of ours")


def _say_left_out(contract: WorkerContract, left_out: Mapping[str, str]) -> None:
    script = contract.script
    assert script is not None
    for module, why in left_out.items() if contract.local_rank == 0 and script.python else ():
        sys.stderr.write(f"outlast: {module} is not imported beforehand: {why}\n")


class _ScriptForked(BaseException):
    """This process is a child that becomes a script."""

    def __init__(self, contract: WorkerContract) -> None:
        super().__init__()
        self.contract = contract


@dataclass(slots=True)
class _Child:
    key: str
    pid: int
    # False for a worker taken over from a standby that died: not ours to reap.
    own: bool
    # Folder of its cgroup, "" when it has none of its own.
    cgroup: str = ""


class Standby:
    """Forks workers on request and reports how they end."""

    def __init__(
        self,
        control: socket.socket,
        rendezvous_fd: int,
        entry: Entry,
        done: Preloaded,
    ) -> None:
        self._control = control
        self._rendezvous_fd = rendezvous_fd
        self._entry = entry
        self._done = done
        self._children: dict[int, _Child] = {}  # by pidfd
        self._poll = select.poll()
        self._unread = b""
        # Came with requests that are not carried out yet, in their order.
        self._descriptors: list[int] = []

    def serve(self) -> None:
        """Work until the agent says exit or its end of the socket closes."""
        self._poll.register(self._control, select.POLLIN)
        imported = {"left_out": self._done.left_out, "is_installed": self._done.is_installed}
        self._tell(event="ready", pid=os.getpid(), **imported)
        while True:
            for handle, _ in self._poll.poll():
                if handle != self._control.fileno():
                    self._reap(handle)
                elif not self._read_requests():
                    self._kill_children()
                    return

    def _read_requests(self) -> bool:
        """Handle what the agent sent; False when the standby must go."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 2**20, _NUM_STREAMS)
        except ConnectionError:
            return False
        self._descriptors += descriptors
        if not data:
            return False
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            match request["op"]:
                case "fork":
                    self._fork(request["key"], request["contract"], request.get("cgroup", ""))
                case "adopt":
                    self._adopt(request["key"], request["pid"])
                case "run":
                    self._run(request["key"], request["program"])
                case "exit":
                    return False
                case unknown:
                    raise ValueError(f"request from the agent: unknown op {unknown!r}")
        return True

    def _may_fork(self, key: str) -> bool:
        """Whether a child would live; whoever asked is told why not."""
        threads = os.listdir("/proc/self/task")
        if len(threads) == 1:
            return True
        detail = (
            f"the standby process has {len(threads)} threads; what is forked from it would "
            "hang. Some import started them: set OMP_NUM_THREADS=1, or find the import"
        )
        self._tell(event="refused", key=key, detail=detail)
        return False

    def _run(self, key: str, given: dict[str, Any]) -> None:
        streams, self._descriptors = (
            self._descriptors[:_NUM_STREAMS],
            self._descriptors[_NUM_STREAMS:],
        )
        try:
            if not self._may_fork(key):
                return
            if len(streams) < _NUM_STREAMS:
                # The kernel drops those for which this process has no room.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            program = programs.Program(
                module=given["module"],
                arguments=tuple(given["arguments"]),
                environment=given["environment"],
                parent=given["parent"],
            )
            at_ns = node_time_ns()
            pid = programs.start(program, streams)
            self._tell(event="started", key=key, pid=pid, at_ns=at_ns)
        except OSError as error:
            self._tell(event="not_started", key=key, detail=f"cannot fork: {error}")
        finally:
            for descriptor in streams:
                os.close(descriptor)

    def _fork(self, key: str, env: dict[str, str], cgroup: str) -> None:
        if not self._may_fork(key):
            return
        forked_at_ns = node_time_ns()
        reach(CrashPoint.STANDBY_FORKING)
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(event="refused", key=key, detail=f"cannot fork: {error}")
            return
        if pid == 0:
            self._become_worker(key, env, forked_at_ns, cgroup)
        reach(CrashPoint.STANDBY_FORKED)
        self._watch(_Child(key, pid, own=True, cgroup=cgroup))
        self._tell(event="forked", key=key, pid=pid, at_ns=forked_at_ns)

    def _become_worker(self, key: str, env: dict[str, str], forked_at_ns: int, cgroup: str) -> None:
        """The rest of a child's life; never returns.

        Raises:
            _ScriptForked: what it is to become is a script.
        """
        code: int = WorkerExitCode.FAILED
        contract: WorkerContract | None = None
        is_script = False
        try:
            _write(cgroup, "cgroup.procs", "0")
            given = WorkerContract.from_env(env)
            listening = None if given.rendezvous_fd is None else self._rendezvous_fd
            contract = replace(given, forked_at_ns=forked_at_ns, rendezvous_fd=listening)
            _enter_child(key, contract)
            reach(CrashPoint.WORKER_FORKED)
            if contract.script is None:
                code = self._entry(contract)
            else:
                # Its descriptor is closed; its number may pass on to others.
                self._control.detach()
                is_script = True
        except SystemExit as exit_request:
            asked = exit_request.code
            code = asked if isinstance(asked, int) else WorkerExitCode.FAILED
        # The last frame of the process: whatever was raised must end here.
        except BaseException as error:  # noqa: BLE001
            _report_failure(error, None if contract is None else contract.error_path)
        finally:
            if not is_script:
                programs.flush_streams()
                # Not sys.exit: clean-up handlers of the standby are not the worker's.
                os._exit(code)
        assert contract is not None
        raise _ScriptForked(contract)

    def _adopt(self, key: str, pid: int) -> None:
        try:
            self._watch(_Child(key, pid, own=False))
        except ProcessLookupError:
            return

    def _watch(self, child: _Child) -> None:
        handle = os.pidfd_open(child.pid)
        self._children[handle] = child
        self._poll.register(handle, select.POLLIN)

    def _reap(self, handle: int) -> None:
        child = self._children.pop(handle)
        self._poll.unregister(handle)
        os.close(handle)
        if child.own:
            _, status = os.waitpid(child.pid, 0)
            self._tell(event="exited", key=child.key, pid=child.pid, status=status)

    def _kill_children(self) -> None:
        for handle, child in self._children.items():
            _write(child.cgroup, "cgroup.kill", "1")
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                # What it started, too: nobody else looks after that.
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            if child.own:
                os.waitpid(child.pid, 0)
            _remove(child.cgroup)

    def _tell(self, **event: object) -> None:
        # An agent that is gone cannot read; the end of the socket says so next.
        try:
            self._control.sendall(json.dumps(event).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return


def _enter_child(key: str, contract: WorkerContract) -> None:
    """Own process group, own log, default signals, and no descriptor of the standby's."""
    os.setpgid(0, 0)
    os.environ[WORKER_MARK] = key
    for number in (signal.SIGINT, STOP_SIGNAL):
        signal.signal(number, signal.SIG_DFL)
    programs.log_to(contract.log_path)
    keep = {0, 1, 2}
    if contract.rendezvous_fd is not None:
        keep.add(contract.rendezvous_fd)
    programs.close_descriptors(keep)


def _write(cgroup: str, name: str, value: str) -> None:
    """Write to a file of a cgroup, if there is one; what that does is then done without it."""
    if not cgroup:
        return
    try:
        with open(f"{cgroup}/{name}", "w", encoding="ascii") as file:
            file.write(value)
    except OSError:
        return


def _remove(cgroup: str) -> None:
    """Remove a cgroup if it is empty by now; else the next agent on this node does."""
    try:
        os.rmdir(cgroup)
    except OSError:
        return


def _report_failure(error: BaseException, path: Path | None) -> None:
    """Say what escaped from the entry point, unless the worker has said so itself."""
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(text)
    if path is None or path.exists():
        return
    kind = type(error)
    report = {
        ErrorField.TYPE: f"{kind.__module__}.{kind.__qualname__}",
        ErrorField.MESSAGE: str(error),
        ErrorField.TRACEBACK: text,
        ErrorField.AT_S: node_time_s(),
    }
    draft = path.with_suffix(".tmp")
    private.write_text(draft, json.dumps(report))
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
