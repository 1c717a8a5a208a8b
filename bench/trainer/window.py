"""Time of sliding-window attention beside full attention, forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.results import Claim
from bench.trainer.launch import run_ranks
from bench.trainer.options import Options
from trainer.model.attention import masked_sdpa
from trainer.model.window import windowed_attention

if TYPE_CHECKING:
    from bench.member import Rank

LENGTHS = (2048, 4096, 8192, 16384)
WINDOWS = (256, 1024, 4096)
_HEADS, _WIDTH = 2, 64


def run(rank: Rank, *, seq_len: int, windows: list[int], rounds: int) -> dict[str, Any]:
    """Seconds of full attention and of every window, in turn."""
    q, k, v = (torch.randn(1, _HEADS, seq_len, _WIDTH, requires_grad=True) for _ in range(3))
    works: dict[str, Callable[[], Tensor]] = {
        "full": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    }
    for window in windows:
        works[str(window)] = lambda window=window: windowed_attention(  # type: ignore[misc]
            q, k, v, window, masked_sdpa
        )
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            begin_s = time.perf_counter()
            out = work()
            out.backward(out.detach())
            if number > 0:
                times[name].append(time.perf_counter() - begin_s)
    return {"seq_len": seq_len, "seconds": times}


def measure(options: Options) -> tuple[list[dict[str, Any]], list[Claim]]:
    """A row per length; claims for the longest, at each window."""
    rows = []
    for seq_len in LENGTHS[:1] if options.small else LENGTHS:
        windows = [window for window in WINDOWS if window < seq_len]
        arguments = {"seq_len": seq_len, "windows": windows, "rounds": options.rounds}
        row = run_ranks("window", arguments, world_size=1)
        full_s = statistics.median(row["seconds"]["full"])
        row["time_vs_full"] = {
            str(window): statistics.median(row["seconds"][str(window)]) / full_s
            for window in windows
        }
        print(
            f"{seq_len} tokens: time over that of full attention", row["time_vs_full"], flush=True
        )
        rows.append(row)
    longest = rows[-1]
    claims = [
        Claim(
            claim=f"window_time_vs_full_w{window}",
            value=ratio,
            unit="x",
            goal="< 1, and less for a smaller window",
            baseline="torch's scaled_dot_product_attention over the whole sequence",
            how=f"{longest['seq_len']} tokens, forward and backward, one thread, medians",
        )
        for window, ratio in longest["time_vs_full"].items()
    ]
    return rows, claims
