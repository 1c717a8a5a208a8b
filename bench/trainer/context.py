"""Attention over a sequence that two ranks divide, on a limited link, beside PyTorch's own means.

Ours is the ring: keys and values go round while what has come is computed with. The baseline
gathers all of them with `torch.distributed.all_gather`, attends to them with
`scaled_dot_product_attention`, and sends the other rank its part of the gradients, as few bytes as
can be. Both have the same zig-zag pieces, so that each rank has the same work. The rate is set so
that what a rank of ours sends takes as long as its step on a free link.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bench.results import Claim
from bench.trainer.launch import LimitedLink, run_ranks
from bench.trainer.options import Options
from bench.trainer.quiet import quiet_mesh
from outlast.layout import Layout
from trainer.core.context import own_pieces
from trainer.parallel.ring import Seen, ring_attention

if TYPE_CHECKING:
    from bench.member import Rank

LENGTHS = (4096, 8192)
_SMALL = (512,)
_HEADS, _WIDTH, _RANKS = 8, 64, 2


def run(rank: Rank, *, seq_len: int, rounds: int) -> dict[str, Any]:
    """Seconds of attention, forward and backward, of ours and of the baseline in turn."""
    mesh = quiet_mesh(rank, Layout(dp=_RANKS, cp=_RANKS))
    pieces = tuple(own_pieces(seq_len, index, _RANKS, in_ring=True) for index in range(_RANKS))
    seen = Seen(pieces=pieces)
    own = sum(stop - start for start, stop in pieces[rank.rank])
    q, k, v = (torch.randn(1, _HEADS, own, _WIDTH, requires_grad=True) for _ in range(3))
    masks = _masks(pieces, rank.rank, seq_len)
    works: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: ring_attention(q, k, v, mesh.cp, seen, None),
        "native": lambda: _gathered(q, k, v, masks),
    }
    _check_alike(works, (q, k, v))
    times: dict[str, list[float]] = {name: [] for name in works}
    before = mesh.cp.bytes_sent
    for number in range(rounds + 1):
        for name, work in works.items():
            took_s = rank.timed(lambda: _both_ways(work))  # noqa: B023  # used at once
            if number > 0:
                times[name].append(took_s)
    return {
        "seq_len": seq_len,
        "step_s": times,
        "sent_bytes": (mesh.cp.bytes_sent - before) / (rounds + 1),
    }


def _both_ways(work: Callable[[], Tensor]) -> None:
    out = work()
    out.backward(out.detach())


def _check_alike(works: dict[str, Callable[[], Tensor]], inputs: tuple[Tensor, ...]) -> None:
    """Both must compute the same, or their times mean nothing."""
    found = []
    for work in works.values():
        _both_ways(work)
        found.append([each.grad for each in inputs])
        for each in inputs:
            each.grad = None
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def _gathered(q: Tensor, k: Tensor, v: Tensor, masks: list[Tensor]) -> Tensor:
    """The own queries' mixtures of all ranks' values."""
    both: Tensor = _AllGather.apply(torch.stack((k, v)))
    key, value = both
    queries = q.chunk(len(masks), dim=2)
    return torch.cat(
        [
            F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            for query, mask in zip(queries, masks, strict=True)
        ],
        dim=2,
    )


class _AllGather(Function):
    """Two ranks' keys and values, in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        found = [torch.empty_like(own) for _ in range(_RANKS)]
        dist.all_gather(found, own.contiguous())
        return torch.cat(found, dim=3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        parts = [part.contiguous() for part in grad.chunk(_RANKS, dim=3)]
        rank = dist.get_rank()
        coming = torch.empty_like(parts[rank])
        moving = [
            dist.P2POp(dist.isend, parts[1 - rank], 1 - rank),
            dist.P2POp(dist.irecv, coming, 1 - rank),
        ]
        for each in dist.batch_isend_irecv(moving):
            each.wait()
        return parts[rank] + coming


def _masks(pieces: tuple[Any, ...], index: int, seq_len: int) -> list[Tensor]:
    """Which keys, in the order of ranks, each of the own pieces sees."""
    places = torch.cat([torch.arange(*piece) for part in pieces for piece in part])
    assert len(places) == seq_len
    return [torch.arange(*piece)[:, None] >= places for piece in pieces[index]]


def measure(options: Options) -> tuple[list[dict[str, Any]], list[Claim]]:
    """A row per length; the claim is the smaller ratio."""
    rows = []
    with LimitedLink().laid() as place:
        for seq_len in _SMALL if options.small else LENGTHS:
            free = _run(seq_len, place, 2)
            free_s = statistics.median(free["step_s"]["ours"])
            place.limit(free["sent_bytes"] * 8 / free_s / 1e6)
            row = _run(seq_len, place, options.rounds)
            place.unlimit()
            row["free_s"] = free["step_s"]
            pairs = zip(row["step_s"]["native"], row["step_s"]["ours"], strict=True)
            row["speed_vs_native"] = statistics.median(theirs / ours for theirs, ours in pairs)
            print(f"ring over {seq_len} tokens: {row['speed_vs_native']:.3f} of all-gather",
                  row["step_s"], flush=True)  # fmt: skip
            rows.append(row)
    claim = Claim(
        claim="context_ring_vs_all_gather_limited_link",
        value=min(row["speed_vs_native"] for row in rows),
        unit="x",
        goal=">= 1.2",
        baseline="torch.distributed.all_gather of keys and values, and SDPA",
        how="two namespaces, veth and tbf, messages as long as a free step of ours, forward and "
        "backward, median of paired steps, the worse of the lengths",
    )
    return rows, [claim]


def _run(seq_len: int, place: LimitedLink, rounds: int) -> dict[str, Any]:
    arguments = {"seq_len": seq_len, "rounds": rounds}
    found: dict[str, Any] = run_ranks("context", arguments, world_size=_RANKS, place=place)
    return found
