"""How much longer than its theory a pipeline's bubble is, through the production engine.

Two stages compute for real; four and eight stages, more than a machine may have
cores, wait for a time instead: a rank that waits holds no core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from bench.results import Claim
from bench.trainer.launch import run_ranks
from bench.trainer.options import Options
from bench.trainer.quiet import quiet_mesh
from outlast.layout import Layout
from trainer.core import schedule as schedules
from trainer.parallel.overlap import TensorParallel
from trainer.parallel.pipeline import MicroBatch, PipelineEngine
from trainer.parallel.tensor import column_linear
from trainer.parallel.weight_gradients import WeightGradient, WeightGradients

if TYPE_CHECKING:
    from bench.member import Rank
    from trainer.parallel.mesh import Mesh

# (stages, chunks a stage, schedule)
CASES = tuple(
    (stages, chunks, name)
    for stages in (2, 4, 8)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))
)
# Long beside what the engine and a process switch take.
WAIT_S = 0.04
_HIDDEN = 768
_BOUNDARY = (64, 4, _HIDDEN)


def wait(x: Tensor, weight: Tensor, seconds: float, gradients: WeightGradients) -> Tensor:
    """`x`; takes `seconds` forward and twice as long backward, half of it for the weight."""
    weight, gradient = gradients.use(weight, x)
    out: Tensor = _Wait.apply(x, weight, seconds, gradient)
    return out


class _Wait(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, seconds: float, gradient: WeightGradient
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds, ctx.gradient = seconds, gradient
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        time.sleep(ctx.seconds)
        of_weight = ctx.gradient.made(partial(_no_gradient, ctx.seconds), weight)
        return grad.clone(), of_weight, None, None


def _no_gradient(seconds: float, weight: Tensor) -> Tensor:
    time.sleep(seconds)
    return torch.zeros_like(weight)


class _Chunk(nn.Module):
    """Matrix products, or a wait in their place."""

    def __init__(self, mesh: Mesh, *, is_last: bool, products: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(_HIDDEN, _HIDDEN) / _HIDDEN**0.5)
        self._tp = TensorParallel(
            comm=mesh.tp, sequence_parallel=False, weight_gradients=mesh.weight_gradients
        )
        self._is_last, self._products, self._seconds = is_last, products, seconds

    def begin(self, step: int, micro_batch: int) -> None:
        """Nothing here depends on it."""

    def forward(
        self, tokens: Tensor, hidden: Tensor | None, targets: Tensor, *_others: object
    ) -> Tensor:
        # The first chunk's input needs a gradient too, so that all do the same work.
        x = torch.ones(_BOUNDARY, requires_grad=True) if hidden is None else hidden
        for _ in range(self._products):
            x = column_linear(x, self.weight, None, self._tp)
        if self._seconds:
            x = wait(x, self.weight, self._seconds, self._tp.weight_gradients)
        return x.sum() if self._is_last else x


def run(
    rank: Rank, *, stages: int, chunks: int, schedule: str, micro_batches: int, rounds: int
) -> dict[str, Any]:
    """The bubble of each round: the share of all ranks' time in which they did not compute."""
    plan = schedules.build(schedule, stages, micro_batches, num_chunks=chunks)
    mesh = quiet_mesh(rank, Layout(pp=stages), folds=plan.folds)
    ends = plan.loss_chunk(mesh.at.pp)
    real = stages == 2
    parts = [
        _Chunk(
            mesh,
            is_last=chunk == ends,
            products=12 // chunks if real else 0,
            seconds=0.0 if real else WAIT_S / chunks,
        )
        for chunk in range(chunks)
    ]
    engine = PipelineEngine(parts, mesh, plan, boundary=_BOUNDARY)
    batches = [MicroBatch(tokens=torch.zeros(1), targets=torch.zeros(1))] * micro_batches
    bubbles = []
    for number in range(rounds + 1):
        took_s = rank.timed(lambda: engine.run(batches, 1.0))
        busy_s = rank.sum(engine.last_timing.busy_s)
        if number > 0:
            bubbles.append(1 - busy_s / (stages * took_s))
    return {"bubble": bubbles}


def measure(options: Options) -> tuple[list[dict[str, Any]], list[Claim]]:
    """A row per case; the claim is about the one furthest from its theory."""
    rows = [_case(stages, chunks, name, options) for stages, chunks, name in CASES]
    worst = max(rows, key=lambda row: row["points_over_theory"])
    claim = Claim(
        claim="bubble_points_over_theory",
        value=worst["points_over_theory"],
        unit="points",
        goal="<= 5",
        baseline="(p - 1) / (v m + p - 1)",
        how="median of the rounds, p = 2 with real matrix products, p = 4 and 8 with timed waits; "
        f"worst case: p = {worst['stages']}, {worst['schedule']}",
    )
    return rows, [claim]


def _case(stages: int, chunks: int, name: str, options: Options) -> dict[str, Any]:
    case: Mapping[str, Any] = {
        "stages": stages,
        "chunks": chunks,
        "schedule": name,
        "micro_batches": 4 if options.small and stages < 8 else 8 if options.small else 16,
        "rounds": 1 if options.small else options.rounds,
    }
    found = run_ranks("bubble", dict(case), world_size=stages)
    theory = schedules.bubble_share(stages, case["micro_batches"], chunks)
    if name == "zb-h1":
        theory = schedules.zero_bubble_share(stages, case["micro_batches"])
    elif name == "zb-v":
        theory = schedules.zero_bubble_v_share(stages, case["micro_batches"])
    measured = statistics.median(found["bubble"])
    row = {**case, **found, "theory": theory, "points_over_theory": 100 * (measured - theory)}
    print(f"p={stages} v={chunks} {name}: bubble {measured:.3f}, theory {theory:.3f}", flush=True)
    return row
