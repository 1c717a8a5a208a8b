"""What sampling the links of a node takes of a core, with counters of a real device."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from controller.agent.observe.links import Sampler

# A node of eight GPUs has as many ports.
_LINKS = 8
_WINDOWS = 8


def measure(folder: Path, *, small: bool) -> dict[str, Any]:
    """CPU time of the sampling thread, as a share, once it has found how often to read."""
    devices = folder / "sys/class/net"
    devices.mkdir(parents=True)
    # Reading it takes as long under any name.
    real = Path("/sys/class/net/lo").resolve()
    num_links, num_windows = (2, 1) if small else (_LINKS, _WINDOWS)
    for number in range(num_links):
        (devices / f"rail{number}").symlink_to(real)
    sampler = Sampler(folder)
    shares, intervals_s, seen = [], [], 0
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
