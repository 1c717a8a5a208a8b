"""What ranks do in tests of steps that two replicas compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.trainer.jobs import digest_of, worked
from tests.trainer.ranks import RankContext
from trainer.recovery import replay
from trainer.recovery.replay import BitSum
from trainer.worker import process as worker
from trainer.worker.state import TrainState


def train_again(
    context: RankContext,
    folder: Path,
    spec: dict[str, Any],
    attempt: int,
    replayed_step: int,
    suspects: tuple[str, ...],
    wrong_rank: int,
    is_another_kind: bool = False,
) -> dict[str, Any]:
    """A whole worker that does a step again, each rank on a node of its own.

    On `wrong_rank` one gradient has a wrong bit, the lowest; -1 for nowhere. Its processor may be
    of another kind.
    """
    if context.rank == wrong_rank:
        if is_another_kind:
            replay.environment = lambda _: {"device": "another"}
        build = worker.build_state

        def wrong(*arguments: Any) -> TrainState:
            state = build(*arguments)
            parameter = next(iter(state.flat.parameters.values()))
            parameter.register_hook(_with_a_wrong_bit)
            return state

        worker.build_state = wrong
    code, states = worked(
        context,
        folder,
        spec,
        attempt,
        replayed_step=replayed_step,
        suspects=suspects,
        nodes=tuple(f"n{rank}" for rank in range(context.world_size)),
    )
    return {"code": code, "state": digest_of(states)}


def _with_a_wrong_bit(grad: torch.Tensor) -> torch.Tensor:
    wrong = grad.clone()
    wrong.view(torch.int32).view(-1)[0] ^= 1
    return wrong


def train_to_infinity(
    context: RankContext,
    folder: Path,
    spec: dict[str, Any],
    wrong_rank: int,
    after_the_sum: bool,
) -> int:
    """A whole worker's exit code; `wrong_rank` has an infinite gradient in every step."""
    if context.rank == wrong_rank:
        build = worker.build_state

        def wrong(*arguments: Any) -> TrainState:
            state = build(*arguments)
            if after_the_sum:
                _spoil_sums(state)
            else:
                # Whose gradient both ends of a pipeline had, that of a tied table does not tell.
                facts = state.flat.facts
                name = next(name for name in facts if not facts[name].tied)
                parameter = state.flat.parameters[name]
                parameter.register_hook(lambda grad: grad * torch.inf)
            return state

        worker.build_state = wrong
    code, _ = worked(context, folder, spec, 1)
    return code


def _spoil_sums(state: TrainState) -> None:
    finish = state.data_parallel.finish_gradients

    def finished() -> None:
        finish()
        state.flat.parts[0].grads.fill_(torch.inf)

    state.data_parallel.finish_gradients = finished  # type: ignore[method-assign]


def bit_sums(context: RankContext) -> dict[str, list[int]]:
    """Sums of tensors that differ in one bit, in the order of values or of calls."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    sums: dict[str, list[int]] = {"same": [_sum(values), _sum(values.clone().view(10, 100))]}
    for dtype, integer in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        typed = values.to(dtype)
        flipped = []
        for place in (0, 1, 999):
            for bit in range(torch.iinfo(integer).bits - 1):
                other = typed.clone()
                other.view(integer)[place] ^= 1 << bit
                flipped.append(_sum(other))
        sums[str(dtype)] = [_sum(typed), *flipped]
    sums["order"] = [_sum(values, values[:7]), _sum(values[:7], values), _sum(values.flip(0))]
    return sums


def _sum(*tensors: torch.Tensor) -> int:
    total = BitSum(torch.device("cpu"))
    for tensor in tensors:
        total.add(tensor)
    return int(total.value)
