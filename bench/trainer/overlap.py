"""How close a tensor-parallel layer comes to hiding all that can be hidden.

The ideal takes, for each matrix product and the message beside it, the longer of
the two, and everything else in full. Both are measured alone, on the same ranks and
link as the layer itself.
"""

# S sequence, B micro-batch, D model width, F features, H heads, C head width, N = S*B
# tokens. Features and heads are a rank's own; D, S and N are whole.
from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.results import Claim
from bench.trainer.launch import LimitedLink, run_ranks
from bench.trainer.options import Options
from bench.trainer.quiet import quiet_mesh
from outlast.layout import Layout
from trainer.parallel.comm import Comm
from trainer.parallel.tensor import TensorParallel, column_linear, row_linear

if TYPE_CHECKING:
    from bench.member import Rank

SIZES = {"seq_len": 512, "batch": 4, "hidden": 1024, "heads": 16, "chunks": 4}
SMALL = {"seq_len": 64, "batch": 1, "hidden": 64, "heads": 4, "chunks": 4}


class _Layer:
    """One serial block without biases, from the functions that the model uses."""

    def __init__(self, tp: TensorParallel, sizes: dict[str, int]) -> None:
        self.tp, self.sizes = tp, sizes
        hidden, size = sizes["hidden"], tp.comm.size
        self.heads = sizes["heads"] // size
        shapes = {
            "qkv": (3 * hidden // size, hidden),
            "out": (hidden, hidden // size),
            "up": (4 * hidden // size, hidden),
            "down": (hidden, 4 * hidden // size),
        }
        self.weights = {
            name: (torch.randn(shape) / hidden**0.5).requires_grad_()
            for name, shape in shapes.items()
        }
        local = (sizes["seq_len"] // size, sizes["batch"], hidden)
        self.x = torch.randn(local, requires_grad=True)
        self.grad = torch.randn(local)

    def run(self) -> None:
        """Forward and backward."""
        x, weights = self.x, self.weights
        mixed = self._attend(column_linear(self._norm(x), weights["qkv"], None, self.tp))
        x = x + row_linear(mixed, weights["out"], None, self.tp)
        wide = F.gelu(column_linear(self._norm(x), weights["up"], None, self.tp))
        x = x + row_linear(wide, weights["down"], None, self.tp)
        x.backward(self.grad)

    def unpaired(self) -> Callable[[], None]:
        """Forward and backward of all that has no message beside it."""
        seq_len, batch = self.sizes["seq_len"], self.sizes["batch"]
        qkv, wide = (
            torch.randn((seq_len, batch, self.weights[name].shape[0]), requires_grad=True)
            for name in ("qkv", "up")
        )

        def work() -> None:
            x = self.x
            for _ in range(2):
                x = x + self._norm(x)
            x.backward(self.grad)
            for out in (self._attend(qkv), F.gelu(wide)):
                out.backward(out.detach())

        return work

    def _norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    def _attend(self, qkv: Tensor) -> Tensor:
        seq_len, batch = qkv.shape[:2]
        heads = qkv.view(seq_len, batch, self.heads, 3, -1).permute(3, 1, 2, 0, 4)
        query, key, value = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.permute(2, 0, 1, 3).reshape(seq_len, batch, -1)


def run(rank: Rank, *, sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    """Seconds of the layer and of everything in it alone."""
    mesh = quiet_mesh(rank, Layout(tp=rank.world_size))
    layers = {
        chunks: _Layer(TensorParallel(comm=mesh.tp, sequence_parallel=True, chunks=chunks), sizes)
        for chunks in (sizes["chunks"], 1)
    }
    layer = layers[sizes["chunks"]]
    works: dict[str, Callable[[], Any]] = {
        "layer": layer.run,
        "layer without overlap": layers[1].run,
        "unpaired": layer.unpaired(),
    }
    for name, weight in layer.weights.items():
        works |= _pairs(name, weight.detach(), sizes, mesh.tp)
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            took_s = rank.timed(work)
            if number > 0:
                times[name].append(took_s)
    bytes_before = mesh.tp.bytes_sent
    layer.run()
    return {"seconds": times, "bytes_sent": mesh.tp.bytes_sent - bytes_before}


def _pairs(
    name: str, weight: Tensor, sizes: dict[str, int], comm: Comm
) -> dict[str, Callable[[], Any]]:
    """The products of a linear layer and the messages beside them, each alone."""
    tokens = sizes["seq_len"] * sizes["batch"]
    before, after = torch.randn(tokens, weight.shape[1]), torch.randn(tokens, weight.shape[0])
    whole = torch.randn(tokens, sizes["hidden"])
    shard = whole.chunk(comm.size)[comm.index].contiguous()

    def backward() -> tuple[Tensor, Tensor]:
        return after @ weight, after.t() @ before

    def gather_and_scatter() -> None:
        comm.all_gather(shard)
        comm.reduce_scatter(whole)

    forward_message: Callable[[], Any]
    backward_message: Callable[[], Any]
    if name in ("qkv", "up"):
        forward_message, backward_message = lambda: comm.all_gather(shard), gather_and_scatter
    else:
        forward_message = lambda: comm.reduce_scatter(whole)  # noqa: E731
        backward_message = lambda: comm.all_gather(shard)  # noqa: E731
    return {
        f"{name} forward compute": lambda: before @ weight.t(),
        f"{name} forward message": forward_message,
        f"{name} backward compute": backward,
        f"{name} backward message": backward_message,
    }


def measure(options: Options) -> tuple[list[dict[str, Any]], list[Claim]]:
    """One row and claim, at a rate where messages take as long as products."""
    sizes = SMALL if options.small else SIZES
    rounds = 2 if options.small else 3 * options.rounds
    with LimitedLink().laid() as place:
        free = _medians(_run(sizes, place, 2))
        compute_s = sum(took_s for name, took_s in free.items() if name.endswith("compute"))
        row = _run(sizes, place, 2)
        megabits_per_s = row["bytes_sent"] * 8 / compute_s / 1e6
        place.limit(megabits_per_s)
        row = _run(sizes, place, rounds)
    medians = _medians(row)
    ideal_s = medians["unpaired"] + sum(
        max(medians[f"{name} {way} compute"], medians[f"{name} {way} message"])
        for name in ("qkv", "out", "up", "down")
        for way in ("forward", "backward")
    )
    found = {
        "megabits_per_s": megabits_per_s,
        "median_s": medians,
        "ideal_s": ideal_s,
        "overlap_vs_ideal": medians["layer"] / ideal_s,
        "overlap_vs_none": medians["layer without overlap"] / medians["layer"],
    }
    print(f"layer over ideal: {found['overlap_vs_ideal']:.3f}, faster than without overlap by "
          f"{found['overlap_vs_none']:.2f}", flush=True)  # fmt: skip
    claim = Claim(
        claim="overlap_vs_ideal",
        value=found["overlap_vs_ideal"],
        unit="x",
        goal="<= 1.15",
        baseline="sum over matrix products of max(compute, message), plus compute without message",
        how=f"one block, tp2, two namespaces at {megabits_per_s:.0f} Mbit/s "
        "(messages = products), medians",
    )
    return [{**row, **found}], [claim]


def _run(sizes: dict[str, int], place: LimitedLink, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(
        "overlap", {"sizes": sizes, "rounds": rounds}, world_size=2, place=place
    )
    return found


def _medians(row: dict[str, Any]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in row["seconds"].items()}
