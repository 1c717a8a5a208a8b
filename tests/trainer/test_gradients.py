"""Finite differences of the model's own autograd functions, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from outlast.blackbox import Group
from trainer.model.recompute import recompute
from trainer.parallel.comm import Comm
from trainer.parallel.tensor import TensorParallel, vocab_embedding
from trainer.parallel.vocab import vocab_loss

ALONE = TensorParallel(comm=Comm(group=Group.TP, ranks=(0,), index=0), sequence_parallel=False)


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def test_gradients_of_the_vocabulary_loss() -> None:
    targets = torch.tensor([[0, 5], [6, 3], [2, 2]])

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return vocab_loss(
            hidden, weight, targets, ALONE, bias_V=bias, logit_scale=0.7, max_logits=14
        )

    assert torch.autograd.gradcheck(loss, (_random(3, 2, 4), _random(7, 4), _random(7)))


def test_the_gradient_of_a_common_token_keeps_every_row() -> None:
    """Sums in bf16 would stop at 256: one more is less than they can tell apart."""
    weight = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.ones(1024, 2, dtype=torch.int64)
    vocab_embedding(tokens, weight, ALONE).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16
    assert weight.grad.tolist() == [[0.0, 0.0], [2048.0, 2048.0], [0.0, 0.0]]


def test_gradients_of_a_recomputed_part() -> None:
    def part(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x @ y) * x.sum()

    inputs = (_random(3, 4), _random(4, 2))
    assert torch.autograd.gradcheck(lambda x, y: recompute(part, x, y), inputs)
