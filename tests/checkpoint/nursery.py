"""Forks ranks that stage step after step, for a test to kill.

`python -m tests.checkpoint.nursery FOLDER`. Each line read is an attempt number:
two ranks are forked for it and their pids printed; the next line ends them.

The ranks move in lockstep through a shared file, which stands for the all-reduce
of a real step: words 0-1 say how far each rank is, 2-5 its newest sealed step (two
per rank, by parity of the step), 6-7 the newest common step each rank knows of.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from checkpoint.core.names import memory_folder
from checkpoint.core.slots import common_step
from checkpoint.restore.restore import SealedStep, load_memory, sealed_steps
from checkpoint.stage.payload import NamedTensor
from checkpoint.stage.stager import Stager

NUM_RANKS = 2
NUM_ITEMS = 1 << 19
LOCKSTEP_FILE = "lockstep"
LOCKSTEP_BYTES = 4096
ARRIVED, NEWEST, KNOWN = 0, 2, 6
# Nobody uploads, so each of them replaces the one before.
UPLOAD_INTERVAL = 3


def state_of(rank: int) -> list[NamedTensor]:
    tensors = [torch.zeros(NUM_ITEMS), torch.zeros(NUM_ITEMS, dtype=torch.float64), torch.zeros(3)]
    return [
        NamedTensor(f"t{number}.of{rank}", tensor, tuple(tensor.shape), (0,))
        for number, tensor in enumerate(tensors)
    ]


def open_lockstep(folder: Path) -> memoryview:
    handle = os.open(folder / LOCKSTEP_FILE, os.O_RDWR | os.O_CREAT)
    os.ftruncate(handle, LOCKSTEP_BYTES)
    mapped = mmap.mmap(handle, LOCKSTEP_BYTES)
    os.close(handle)
    return memoryview(mapped).cast("q")


def common_steps(folder: Path, states: list[list[NamedTensor]]) -> list[SealedStep]:
    """What all ranks have sealed, newest first."""
    found = [
        set(sealed_steps(folder / memory_folder(rank), state)) for rank, state in enumerate(states)
    ]
    return sorted(set.intersection(*found), reverse=True)


def train(folder: Path, rank: int, attempt: int, words: memoryview) -> None:
    """Resume from the newest common step and go on for ever."""
    torch.set_num_threads(1)
    states = [state_of(other) for other in range(NUM_RANKS)]
    state = states[rank]
    step = 0
    for sealed in common_steps(folder, states)[:1]:
        load_memory(folder / memory_folder(rank), sealed, state)
        step = sealed.step
    stager = Stager(
        folder / memory_folder(rank),
        rank=rank,
        attempt=attempt,
        world_size=NUM_RANKS,
        tensors=state,
    )
    stager.resumed(step)
    common = step
    while True:
        step += 1
        for named in state:
            named.tensor.add_(1)
        words[NEWEST + 2 * rank + step % 2] = stager.newest_sealed
        words[ARRIVED + rank] = step
        while min(words[ARRIVED : ARRIVED + NUM_RANKS]) < step:
            time.sleep(0)
        newest = [words[NEWEST + 2 * other + step % 2] for other in range(NUM_RANKS)]
        common = common_step(lowest=min(newest), highest=max(newest), known=common)
        words[KNOWN + rank] = max(0, common)
        upload = step % UPLOAD_INTERVAL == 0
        stager.save(step, {"step": step}, upload=upload, common_step=common)


def fork_rank(folder: Path, rank: int, attempt: int, words: memoryview) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            train(folder, rank, attempt, words)
        finally:
            # Training has no end of its own: only an error leads here.
            traceback.print_exc()
            os._exit(1)
    return pid


def main() -> None:
    folder = Path(sys.argv[1])
    words = open_lockstep(folder)
    for line in sys.stdin:
        pids = [fork_rank(folder, rank, int(line), words) for rank in range(NUM_RANKS)]
        print(*pids, flush=True)
        sys.stdin.readline()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        # The next attempt must not take an arrival of this one for its own.
        for word in range(ARRIVED, NEWEST):
            words[word] = 0
        print("ended", flush=True)


if __name__ == "__main__":
    main()
