"""Masked language modelling: which tokens are hidden, and that nothing but the step decides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.spec.parse import parse_spec
from outlast.tokens.fit import look_at_data
from tests.trainer.jobs_numbers import losses
from tests.trainer.ranks import RankPool
from tests.trainer.test_documents import instructions
from trainer.core.batch import BatchPlan
from trainer.data.loader import Loader, Split
from trainer.data.masking import Masking
from trainer.parallel.pipeline import MicroBatch

MASK, CLS, VOCAB = 90, 91, 96


def masking(**given: Any) -> Masking:
    usual: dict[str, Any] = {
        "fraction": 0.15,
        "mask_token": MASK,
        "random": 0.1,
        "kept": 0.1,
        "never": (CLS,),
        "vocab_size": VOCAB,
        "seed": 3,
    }
    return Masking(**{**usual, **given})


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, MASK, length)


@given(
    length=st.integers(1, 200),
    fraction=st.floats(0.01, 0.99),
    step=st.integers(1, 10**9),
    seed=st.integers(0, 2**63 - 1),
)
def test_targets_are_what_was_hidden_and_the_rest_stays(
    length: int, fraction: float, step: int, seed: int
) -> None:
    given_tokens = tokens(length)
    given_tokens[::7] = CLS
    shown, targets = masking(fraction=fraction, seed=seed).hidden(given_tokens, (step, 0, 5))
    is_target = targets >= 0
    assert np.array_equal(targets[is_target], given_tokens[is_target])
    assert np.array_equal(shown[~is_target], given_tokens[~is_target])
    assert not (is_target & (given_tokens == CLS)).any()
    assert is_target.any() == (given_tokens != CLS).any()
    assert shown.min() >= 0
    assert shown.max() < VOCAB


def test_shares_are_those_of_the_paper() -> None:
    given_tokens = tokens(400_000)
    shown, targets = masking().hidden(given_tokens, (1, 0, 0))
    is_target = targets >= 0
    hidden, before = shown[is_target], given_tokens[is_target]
    assert is_target.mean() == pytest.approx(0.15, abs=0.003)
    # Of a random token one in 96 is the mask, and one the token itself.
    assert (hidden == MASK).mean() == pytest.approx(0.8 + 0.1 / VOCAB, abs=0.006)
    assert (hidden == before).mean() == pytest.approx(0.1 + 0.1 / VOCAB, abs=0.004)


def test_the_same_tokens_are_hidden_on_every_machine() -> None:
    """Numbers of Philox, which never change: a run that goes on elsewhere reads the same."""
    _, targets = masking().hidden(np.arange(40), (7, 1, 2))
    assert np.flatnonzero(targets >= 0).tolist() == [1, 8, 15, 37]


def test_each_step_and_each_sequence_hides_others_but_evaluation_does_not() -> None:
    batch = MicroBatch(
        tokens=torch.arange(80).view(80, 1).repeat(1, 2), targets=torch.zeros(80, 2).long()
    )
    trained_on = masking()
    first, second = (trained_on.hide(batch, step, [4, 5]) for step in (1, 2))
    assert not torch.equal(first.targets, second.targets)
    assert not torch.equal(first.targets[:, 0], first.targets[:, 1])
    assert torch.equal(first.targets, trained_on.hide(batch, 1, [4, 5]).targets)
    held_out = masking(varies=False)
    one, other = (held_out.hide(batch, step, [4, 5]) for step in (1, 2))
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.targets, other.targets)
    assert one.num_predicted == int((one.targets >= 0).sum())
    # What was read stays as it was.
    assert torch.equal(batch.tokens[:, 0], torch.arange(80))


class _Counting:
    """Sequences of 64 tokens that say which one they are of."""

    def read(self, samples: Any) -> MicroBatch:
        rows = [(torch.arange(64) + sample) % MASK for sample in samples]
        return MicroBatch(tokens=torch.stack(rows, 1), targets=torch.stack(rows, 1))


def read(num_replicas: int, micro_batch: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    plan = BatchPlan(
        global_batch=8, micro_batch=micro_batch, num_replicas=num_replicas, seed=1, num_samples=30
    )
    found = []
    for replica in range(num_replicas):
        split = Split(_Counting(), plan, masking().hide)
        loader = Loader(split, replica=replica, device=torch.device("cpu"))
        found += loader.micro_batches(step)
        loader.close()
    return torch.cat([b.tokens for b in found], 1), torch.cat([b.targets for b in found], 1)


@pytest.mark.parametrize(("num_replicas", "micro_batch"), [(2, 1), (4, 2), (1, 8)])
def test_every_layout_reads_the_same(num_replicas: int, micro_batch: int) -> None:
    for step in (1, 9):
        for one, other in zip(read(1, 1, step), read(num_replicas, micro_batch, step), strict=True):
            assert torch.equal(one, other)


def test_tokens_with_prompts_are_for_causal_models(tmp_path: Path) -> None:
    data = {**instructions(tmp_path), "masked": {"fraction": 0.15, "mask_token": 256}}
    document = {**BERT, "data": data}
    problems, _ = look_at_data(parse_spec(document), lambda url: None)
    assert [problem.field for problem in problems] == ["data.masked.fraction"]
    assert "has prompts" in problems[0].message


BERT = {
    "name": "a",
    "steps": 3,
    "precision": "fp64",
    "model": {
        "layers": 4,
        "hidden": 16,
        "heads": 2,
        "ffn_hidden": 32,
        "seq_len": 16,
        "vocab_size": 258,
        "attention": "bidirectional",
        "segments": 2,
        "head_transform": True,
        "head_bias": True,
    },
    "data": {"masked": {"fraction": 0.3, "mask_token": 256}, "max_bytes": 2**14},
    "eval": {"interval_steps": 3, "batches": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp zero 3": {"dp": 4, "zero": {"level": 3}},
    "tp pp dp": {"tp": 2, "pp": 2, "dp": 2, "zero": {"level": 1}},
    "tp whole sequence": {"tp": 2, "sequence_parallel": False, "recompute": "full"},
    "interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
}


@pytest.mark.parametrize("placed", [{}, {"norm_place": "sum", "embedding_norm": True}])
def test_the_losses_of_bert_are_the_same_on_every_layout(
    ranks: RankPool, tmp_path: Path, placed: dict[str, Any]
) -> None:
    """With norms where Megatron has them, and where they were at first."""
    document = {**BERT, "model": {**BERT["model"], **placed}}  # type: ignore[dict-item]
    (dense,) = ranks.run(losses, 1, document, tmp_path / "dense")
    assert dense["loss"][0] == pytest.approx(dense["expected"], rel=1e-12)
    for name, parallel in LAYOUTS.items():
        spec = {**document, "parallel": parallel}
        size = parse_spec(spec).layout.world_size
        (found, *_) = ranks.run(losses, size, spec, tmp_path / name)
        assert found["loss"] == pytest.approx(dense["loss"], rel=1e-10), name
        assert found["held_out"] == pytest.approx(dense["held_out"], rel=1e-10), name
