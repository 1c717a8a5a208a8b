"""The loss of a split vocabulary, in chunks of tokens: its value and its gradients."""

from __future__ import annotations

import numpy as np
import pytest

from outlast.spec import parse_spec
from tests.trainer.jobs_model import LossCase, vocab_loss_case
from tests.trainer.ranks import RankPool
from trainer.core.activations import loss_bytes
from trainer.core.loss_chunks import loss_chunk_tokens
from trainer.planning import plan_input

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
