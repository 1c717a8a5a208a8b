"""Where processes stand before they are killed: native and Python stacks of workers,
the threads of this agent that load and upload, and NCCL's flight recorder.

py-spy reads a process from outside, so it needs nothing of one that hangs, is stopped or
waits in the kernel. Without it, or where the kernel forbids it, what /proc says remains.
Nothing here may hold a restart up: there is one deadline for all of it.

It stops whom it reads, and of a thread that cannot be woken it waits until it can be. Workers
are killed afterwards. This agent must live on, so it is read only while all of its threads
can be woken, and only for a moment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from controller.agent.workers import py_spy
from controller.agent.workers.processes import process_state
from controller.agent.workers.worker import Worker
from diagnostics.core.stacks import location_of
from outlast import private
from outlast.v1 import agents_pb2
from outlast.worker_contract import flight_record, flight_record_pipe

logger = logging.getLogger(__name__)

# py-spy takes 0.1 s for a worker with its native frames; a node has up to 8 of them.
DEADLINE_S = 5.0
# Of a look at what goes on; a node that takes longer to answer is given up.
LOOK_DEADLINE_S = 20.0
# Each of them reads symbols for a while: not all at once beside what still trains.
MAX_AT_ONCE = 4
# Of this agent, which stands still meanwhile: at most 0.09 s with 15 threads on two busy
# cores, and it is to be heard every 2 s. It cannot end what holds it, so that ends by itself.
OWN_LOOK_S = 1.0
# Threads begin and end: one that is not there any more, or not yet, when py-spy comes to it makes
# the whole of the look fail, at once. Of ranks that py-spy stops meanwhile none does.
LOOKS = 3
_BOUNDED = (
    "import os, signal, sys; signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1])); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)
# Of one process to the controller; the file has all.
MAX_TEXT_BYTES = 12_000
_STATES = {
    "R": "running",
    "S": "asleep",
    "D": "in the kernel, not to be woken",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
}
_UNWAKABLE = "D"
_NO_TOOL = f"no stacks: {py_spy.MISSING}\n"
_TOO_SLOW = "no stacks: reading them took longer than {:g} s\n"
_LOOK_S = 0.05


async def collect(
    workers: Iterable[Worker], *, within_s: float = DEADLINE_S
) -> list[agents_pb2.RankStacks]:
    """Stacks of every worker that runs, and of this agent (rank -1), within `within_s`.

    Of those that take longer, what /proc says.
    """
    deadline_s = time.monotonic() + within_s
    workers = list(workers)
    # First: torch writes it in a thread of its own, beside the rest.
    records = {worker.rank: _ask_for_flight_record(worker) for worker in workers}
    gate = asyncio.Semaphore(MAX_AT_ONCE)
    # Before any is looked into: one that is let go again runs for a moment.
    states = {worker.rank: _state_of(worker) for worker in workers}
    tasks = {
        asyncio.create_task(_collect_one(worker, states[worker.rank], gate)): worker
        for worker in workers
    }
    # After the workers, which may end meanwhile.
    own = asyncio.create_task(_collect_own(gate))
    done, late = await asyncio.wait([*tasks, own], timeout=within_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    too_slow = _TOO_SLOW.format(within_s)
    folder = workers[0].paths.log.parent if workers else None
    found = [_own_stacks(*(own.result() if own in done else ("", too_slow)), folder)]
    found += [
        task.result() if task in done else _stacks_of(worker, states[worker.rank], "", too_slow)
        for task, worker in tasks.items()
    ]
    await _wait_for([path for path in records.values() if path is not None], deadline_s)
    for stacks in found:
        record = records.get(stacks.rank)
        if record is not None and record.exists():
            stacks.paths.append(str(record))
    return found


async def look(
    workers: Iterable[Worker], *, native: bool, within_s: float = LOOK_DEADLINE_S
) -> list[tuple[Worker, agents_pb2.RankStacks]]:
    """Stacks of workers that go on afterwards, for a person who asks; of late ones what /proc says.

    `native` frames take longer, and workers stand still meanwhile. Nothing is written down: the
    files are those of what failed.
    """
    ways = ("--native", "--nonblocking") if native else ("--nonblocking",)
    gate = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(worker: Worker) -> tuple[Worker, agents_pb2.RankStacks]:
        assert worker.pid is not None
        # Before it is looked into: one that is let go again runs for a moment.
        state = _state_of(worker)
        try:
            async with asyncio.timeout(within_s), gate:
                dump, why_not = await _dump(worker.pid, ways)
        except TimeoutError:
            dump, why_not = "", _TOO_SLOW.format(within_s)
        return worker, _described(worker, state, dump, why_not)

    return await asyncio.gather(*(one(each) for each in workers if each.pid is not None))


async def _wait_for(paths: list[Path], deadline_s: float) -> None:
    """Until all these files are there, or it is too late."""
    while time.monotonic() < deadline_s and not all(path.exists() for path in paths):
        await asyncio.sleep(_LOOK_S)


async def _collect_one(
    worker: Worker, state: str, gate: asyncio.Semaphore
) -> agents_pb2.RankStacks:
    async with gate:
        assert worker.pid is not None
        dump, why_not = await _dump(worker.pid)
    return _stacks_of(worker, state, dump, why_not)


def _state_of(worker: Worker) -> str:
    assert worker.pid is not None
    return process_state(worker.pid)


def _stacks_of(worker: Worker, state: str, dump: str, why_not: str) -> agents_pb2.RankStacks:
    found = _described(worker, state, dump, why_not)
    found.paths.extend(_write(worker.paths.log.with_suffix(".stacks.txt"), found.text))
    found.text = found.text[:MAX_TEXT_BYTES]
    return found


def _described(worker: Worker, state: str, dump: str, why_not: str) -> agents_pb2.RankStacks:
    """Where a worker stands, with all of the text."""
    assert worker.pid is not None
    location = location_of(dump) or _kernel_location(worker.pid)
    return agents_pb2.RankStacks(
        rank=worker.rank,
        location=f"{_STATES.get(state, state)} at {location or 'an unknown location'}",
        text=f"process {worker.pid}: {_STATES.get(state, state)}\n{why_not}{dump}",
    )


async def _dump(pid: int, ways: Sequence[str] = ("--native", "--nonblocking")) -> tuple[str, str]:
    """What py-spy prints of a process, and why that is less than it should be."""
    tool = py_spy.find()
    if tool is None:
        return "", _NO_TOOL
    problem = ""
    for how in ways:
        error = ""
        for _ in range(1 if how == "--native" else LOOKS):
            code, output, error = await py_spy.run(tool, "dump", how, "--pid", str(pid))
            if code == 0:
                return output, problem
        problem += f"py-spy dump {how}: {error}\n"
    return "", problem


async def _collect_own(gate: asyncio.Semaphore) -> tuple[str, str]:
    """What py-spy prints of this agent, and why it does not."""
    async with gate:
        tool = py_spy.find()
        if tool is None:
            return "", _NO_TOOL
        stuck = [
            f"{thread.name} at {_kernel_location(thread.native_id) or 'an unknown location'}"
            for thread in threading.enumerate()
            if thread.native_id and process_state(thread.native_id) == _UNWAKABLE
        ]
        if stuck:
            return "", f"no native frames: {_STATES[_UNWAKABLE]}: {', '.join(stuck)}\n"
        bounded = (sys.executable, "-I", "-S", "-c", _BOUNDED, str(OWN_LOOK_S))
        command = (*bounded, tool, "dump", "--native", "--pid", str(os.getpid()))
        reason = ""
        for _ in range(LOOKS):
            code, output, reason = await py_spy.run(*command)
            if code == 0:
                return output, ""
            if code == -signal.SIGALRM:
                reason = f"took over {OWN_LOOK_S:g} s"
                break
        return "", f"no native frames: py-spy dump --native: {reason}\n"


def _kernel_location(pid: int) -> str:
    """Where in the kernel a process waits, when it says so."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        return ""


def _ask_for_flight_record(worker: Worker) -> Path | None:
    """Have torch write NCCL's flight recorder down; where that will be, if it can be had."""
    folder = worker.paths.log.parent
    pipe = flight_record_pipe(folder, worker.rank)
    if not pipe.is_fifo():
        return None
    record = flight_record(folder, worker.rank)
    try:
        # What an earlier hang left would pass for this one's.
        record.unlink(missing_ok=True)
        # Unlike a shell's redirection this does not wait for a reader.
        with open(pipe, "r+b", buffering=0) as file:
            file.write(b"1\n")
    except OSError as error:
        logger.warning("no flight recorder: worker=%s %s", worker.key, error)
        return None
    return record


def _own_stacks(dump: str, why_not: str, folder: Path | None) -> agents_pb2.RankStacks:
    """This agent's own threads, which upload and read checkpoints; the file is in `folder`."""
    names = ", ".join(thread.name for thread in threading.enumerate()[:8])
    text = f"{why_not}{dump or _own_frames()}"
    return agents_pb2.RankStacks(
        rank=-1,
        location=f"the agent's threads: {names}",
        text=text[:MAX_TEXT_BYTES],
        paths=[] if folder is None else _write(folder / "agent.stacks.txt", text),
    )


def _own_frames() -> str:
    """The Python frames of the other threads, and where in the kernel each one is."""
    frames = sys._current_frames()
    parts = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or thread is threading.current_thread() or not thread.native_id:
            continue
        state = process_state(thread.native_id)
        location = _kernel_location(thread.native_id) or "an unknown location"
        head = f'Thread "{thread.name}" ({_STATES.get(state, state)} at {location})'
        parts.append(f"{head}\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)


def _write(path: Path, text: str) -> list[str]:
    try:
        private.write_text(path, text)
    except OSError as error:
        logger.warning("stacks are not kept: %s: %s", path, error)
        return []
    return [str(path)]
