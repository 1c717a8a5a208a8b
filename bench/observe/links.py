"""What sampling the links of a node takes of a core, with counters of a real device.

Agents sample while ranks run, and those keep the cores busy. On cores that sleep in between, a
thread's waking up costs nearly twice as much.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from controller.agent.observe.links import Sampler

# A node in the cloud has one; a node of eight GPUs has a port for each.
_LINKS = (1, 8)
_WINDOWS = 20


def measure(folder: Path, *, small: bool) -> dict[str, Any]:
    """For each number of links, once the sampler has found how often to read."""
    numbers = (2,) if small else _LINKS
    windows = 1 if small else _WINDOWS
    with _busy_cores():
        return {"nodes": [_sampled(folder / f"{number}", number, windows) for number in numbers]}


@contextlib.contextmanager
def _busy_cores() -> Iterator[None]:
    """A process for each core that computes all the time."""
    with contextlib.ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            process = subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def _sampled(folder: Path, num_links: int, num_windows: int) -> dict[str, Any]:
    """CPU time of the sampling thread, as a share."""
    devices = folder / "sys/class/net"
    devices.mkdir(parents=True)
    # Reading it takes as long under any name.
    real = Path("/sys/class/net/lo").resolve()
    for number in range(num_links):
        (devices / f"rail{number}").symlink_to(real)
    sampler = Sampler(folder)
    shares: list[float] = []
    intervals_s: list[float] = []
    seen = 0
    sampler.want(True)
    try:
        while len(shares) < num_windows:
            time.sleep(0.1)
            newest = sampler.newest
            if newest.number > seen:
                seen = newest.number
                windows = newest.windows.values()
                shares.append(newest.cost)
                intervals_s.append(max(each.seconds / each.num_samples for each in windows))
    finally:
        sampler.close()
    half = len(shares) // 2
    return {
        "links": num_links,
        "share_of_core": statistics.median(shares[half:]),
        "interval_s": statistics.median(intervals_s[half:]),
    }
