"""The least that a restart's phases can take here: what the system and torch ask for them.

Two ranks at once, as in the benchmark's job, from one process that has imported what a
worker needs and is started as an agent starts it:

    fork      both forks, until the later child runs
    groups    torch's store and one bare gloo group of both, connected
    model     the state's memory, touched for the first time
    restore   a copy of that many bytes out of a file on tmpfs that is not mapped yet

A first step's floor is a later step of the same job.

    python -m bench.recovery.floors --bytes 70000000
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # a re-export

# As warm as the standby process, which imports the entry point of its workers.
import trainer.worker.process  # noqa: F401
from bench.recovery.setting import DEADLINE_S
from controller.agent.workers.environment import standby_environment
from trainer.worker.hugepages import gather_pages

_ROOT = Path(__file__).parents[2]
_NUM_RANKS = 2
_ROUNDS = 5
_PARTS = ("fork", "groups", "model", "restore")


def measure(num_bytes: int) -> dict[str, float]:
    """Medians in seconds of each part, for so many bytes of state on each rank."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.recovery.floors", "--bytes", str(num_bytes)],
        cwd=_ROOT,
        env=standby_environment(os.environ, interface="lo"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the floors could not be measured:\n{done.stderr[-3000:]}")
    floors: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return floors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, required=True)
    num_bytes = parser.parse_args().bytes
    gc.collect()
    gc.freeze()
    gather_pages()
    with _saved(num_bytes) as path:
        rounds = [_restart(path, num_bytes) for _ in range(_ROUNDS)]
    floors = {part: statistics.median(found[part] for found in rounds) for part in _PARTS}
    print(json.dumps({part: round(value, 4) for part, value in floors.items()}))


@contextmanager
def _saved(num_bytes: int) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(prefix="outlast-bench-", dir="/dev/shm") as file:
        file.write(b"\1" * num_bytes)
        file.flush()
        yield Path(file.name)


def _restart(path: Path, num_bytes: int) -> dict[str, float]:
    """Each part's time, from the moment when both ranks are done with the one before."""
    read_end, write_end = os.pipe()
    children = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        begin_s = time.monotonic()
        for rank in range(_NUM_RANKS):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, listening, path, num_bytes, write_end)
            children.append(pid)
        os.close(write_end)
        try:
            # A rank that fails closes its end; both closed end the file.
            with os.fdopen(read_end) as answers:
                ends = [json.loads(line) for line in (answers.readline(), answers.readline())]
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    times = {}
    for part in _PARTS:
        end_s = max(found[part] for found in ends)
        times[part] = end_s - begin_s
        begin_s = end_s
    return times


def _be_rank(rank: int, listening: socket.socket, path: Path, num_bytes: int, answer: int) -> None:
    """The rest of a child's life: it stays until it is killed, as its peer may still need it."""
    ends = {"fork": time.monotonic()}
    # Nobody is left behind where the parent was ended.
    signal.alarm(int(DEADLINE_S))
    try:
        torch.set_num_threads(1)
        _joined = _join(rank, listening)
        ends["groups"] = time.monotonic()
        state = torch.zeros(num_bytes, dtype=torch.uint8).fill_(0)
        ends["model"] = time.monotonic()
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), num_bytes)
        state.copy_(torch.frombuffer(mapped, dtype=torch.uint8))
        ends["restore"] = time.monotonic()
        os.write(answer, json.dumps(ends).encode() + b"\n")
        signal.pause()
    except BaseException:  # noqa: BLE001  # the last frame of the process
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def _join(rank: int, listening: socket.socket) -> object:
    store = TCPStore(
        "127.0.0.1",
        listening.getsockname()[1],
        is_master=rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=DEADLINE_S),
        master_listen_fd=listening.fileno() if rank == 0 else None,
    )
    return dist.ProcessGroupGloo(store, rank, _NUM_RANKS, timedelta(seconds=DEADLINE_S))


if __name__ == "__main__":
    main()
