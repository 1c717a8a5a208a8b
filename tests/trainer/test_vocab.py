"""The loss of a split vocabulary, in chunks of tokens: its value and its gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from outlast.blackbox import Group
from outlast.sizing.of_spec import plan_input
from outlast.spec.parse import parse_spec
from tests.trainer.jobs_model import LossCase, vocab_loss_case
from tests.trainer.ranks import RankPool
from trainer.core.activations import loss_bytes
from trainer.core.loss_chunks import loss_chunk_tokens
from trainer.parallel.comm import Comm
from trainer.parallel.tensor import TensorParallel
from trainer.parallel.vocab import vocab_loss

ALONE = TensorParallel(comm=Comm(group=Group.TP, ranks=(0,), index=0), sequence_parallel=False)

CASES = {
    "one chunk": LossCase(max_logits=10_000),
    "one token a chunk": LossCase(max_logits=1),
    "uneven chunks, bias and scale": LossCase(max_logits=40, biased=True, logit_scale=0.5),
    "no sequence parallelism": LossCase(max_logits=40, biased=True, sequence_parallel=False),
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_whole_logits(
    ranks: RankPool, world_size: int, name: str
) -> None:
    found = ranks.run_once(vocab_loss_case, world_size, CASES[name])
    assert len({result["loss"] for result in found}) == 1
    for result in found:
        assert result["loss"] == pytest.approx(result["expected_loss"], rel=1e-12)
        for part, expected in result["expected"].items():
            np.testing.assert_allclose(result["found"][part], expected, rtol=1e-10, atol=1e-12)


def test_logits_never_exist_for_more_than_a_chunk(ranks: RankPool) -> None:
    """The largest tensor that any operation of a loss made, forward and backward."""
    case = LossCase(max_logits=40)
    (result,) = ranks.run_once(vocab_loss_case, 1, case)
    assert result["largest"] <= 40 * 2
    (whole,) = ranks.run_once(vocab_loss_case, 1, LossCase(max_logits=10_000))
    assert whole["largest"] >= 12 * 16


def test_the_scale_of_a_loss_is_not_rounded_to_16_bits() -> None:
    """A factor between two numbers of bf16, which is what one over the tokens can be."""
    factor = 1 + 2**-8
    torch.manual_seed(0)
    hidden = torch.randn(64, 2, 16, dtype=torch.bfloat16)
    weight = torch.randn(32, 16, dtype=torch.bfloat16)
    targets = torch.randint(0, 32, (64, 2))
    scaled, plain = (_gradients(hidden, weight, targets, by) for by in (factor, 1.0))
    for found, expected in zip(scaled, plain, strict=True):
        assert found.norm() / expected.norm() == pytest.approx(factor, rel=2.5e-3)


def test_a_small_loss_scale_brings_large_sums_into_fp16() -> None:
    """1024 tokens of one target add up to more than fp16 can say."""
    hidden, weight = torch.full((1024, 1, 4), 200.0).half(), torch.zeros(2, 4).half()
    targets = torch.zeros(1024, 1, dtype=torch.int64)
    scale = 2.0**-6
    _, of_weight = _gradients(hidden, weight, targets, scale)
    expected = torch.tensor([-1.0, 1.0]).double().view(2, 1) * 1024 * 0.5 * 200 * scale
    torch.testing.assert_close(of_weight, expected.expand(2, 4), rtol=1e-3, atol=0)
    assert torch.isinf((expected / scale).half()).all(), "the sum itself would overflow"


@pytest.mark.parametrize(
    ("rows", "on_cpu", "on_gpu"), [(8_192, 512, 8_192), (131_072, 32, 1_024), (2**23, 1, 1_024)]
)
def test_a_gpu_takes_more_tokens_at_once(rows: int, on_cpu: int, on_gpu: int) -> None:
    assert loss_chunk_tokens(rows, on_gpu=False) == on_cpu
    assert loss_chunk_tokens(rows, on_gpu=True) == on_gpu


def test_the_plan_counts_the_logits_of_the_device() -> None:
    model = {"hidden": 16, "heads": 2, "seq_len": 2048, "vocab_size": 131_072}
    spec = parse_spec({"name": "a", "precision": "fp32", "model": model})
    on_cpu, on_gpu = (loss_bytes(plan_input(spec, on_gpu=on_gpu)) for on_gpu in (False, True))
    assert on_gpu - on_cpu == (1024 - 32) * 131_072 * 4


def _gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    hidden, weight = (tensor.clone().requires_grad_() for tensor in (hidden, weight))
    (vocab_loss(hidden, weight, targets, ALONE) * factor).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad.double(), weight.grad.double()
