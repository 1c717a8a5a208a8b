"""How fast blocks are summed, beside a plain copy: that is not what holds up a checkpoint."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.baselines.plain import WarmCopy
from bench.checkpoint.options import Measured, Options
from bench.results import Claim
from checkpoint.checksums import CHECKSUM, block_checksums
from checkpoint.core.manifest import BLOCK_BYTES, CHECKSUMS

_NBYTES = 1 << 30
_SMALL_NBYTES = 8 << 20


def measure(options: Options) -> Measured:
    """Rates of all checksums that a manifest may name, and of a plain copy, on one thread."""
    nbytes = _SMALL_NBYTES if options.small else _NBYTES
    payload = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    view = payload.numpy().data

    def sums(name: str) -> Callable[[], object]:
        return lambda: list(block_checksums(name, view, BLOCK_BYTES))

    works: dict[str, Callable[[], object]] = {name: sums(name) for name in CHECKSUMS}
    works["copy"] = WarmCopy([payload]).copy
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, work in works.items():
            begin_s = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - begin_s)
    rates = {name: nbytes / statistics.median(found) / 1e9 for name, found in seconds.items()}
    row: dict[str, Any] = {"nbytes": nbytes, "seconds": seconds, "gigabytes_per_s": rates}
    return [row], [
        Claim(
            claim="checksum_rate_vs_copy",
            value=rates[CHECKSUM] / rates["copy"],
            unit="x",
            goal=">= 1",
            baseline="memmove of the same bytes on one thread",
            how=f"{CHECKSUM} of blocks of {BLOCK_BYTES >> 20} MiB on one thread: "
            f"{rates[CHECKSUM]:.1f} GB/s; an upload sums in up to four",
        )
    ]
