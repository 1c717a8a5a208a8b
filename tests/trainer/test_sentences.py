"""The order of two parts: how sequences are cut, and that nothing but the step decides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.spec.parse import parse_spec
from tests.trainer.jobs_numbers import losses
from tests.trainer.ranks import RankPool
from tests.trainer.test_masking import BERT, LAYOUTS
from trainer.data.sentences import SentenceOrder
from trainer.data.step_batch import StepBatch, Wanted
from trainer.parallel.pipeline import MicroBatch

CLS, SEP, STOP = 91, 92, 7


def order(**given: Any) -> SentenceOrder:
    return SentenceOrder(**{"cls_token": CLS, "sep_token": SEP, "ends": (), "seed": 3, **given})


def parts_of(shown: np.ndarray, segments: np.ndarray, is_swapped: bool) -> list[list[int]]:
    """Both parts in the order in which they were, without the tokens around them."""
    first, second = shown[segments == 0], shown[segments == 1]
    assert (first[0], first[-1], second[-1]) == (CLS, SEP, SEP)
    parts = [first[1:-1].tolist(), second[:-1].tolist()]
    return parts[::-1] if is_swapped else parts


@given(
    tokens=st.lists(st.integers(0, 20), min_size=5, max_size=60),
    step=st.integers(1, 10**9),
    seed=st.integers(0, 2**63 - 1),
    ends=st.sets(st.integers(0, 20), max_size=3),
)
def test_both_parts_are_what_was_there(
    tokens: list[int], step: int, seed: int, ends: set[int]
) -> None:
    cut = order(seed=seed, ends=tuple(ends))
    shown, segments, is_swapped = cut.arranged(np.array(tokens), (step, 0, 5))
    assert len(shown) == len(segments) == len(tokens)
    assert (np.diff(segments) >= 0).all()
    first, second = parts_of(shown, segments, is_swapped)
    assert first + second == tokens[:-3]
    assert first
    assert second
    # Behind the end of a sentence, if one ends before the last token.
    assert first[-1] in ends or not ends & set(tokens[:-4])


def test_half_of_the_sequences_are_swapped_and_cuts_are_anywhere() -> None:
    tokens, found = np.arange(35), []
    for number in range(4_000):
        shown, segments, is_swapped = order().arranged(tokens, (1, 0, number))
        found.append((is_swapped, len(parts_of(shown, segments, is_swapped)[0])))
    swapped, cuts = np.array(found).T
    assert swapped.mean() == pytest.approx(0.5, abs=0.03)
    assert set(cuts) == set(range(1, 32))
    assert np.bincount(cuts)[1:].min() > 4_000 / 31 / 2


def test_the_same_cuts_are_made_on_every_machine() -> None:
    """Numbers of Philox, which never change: a run that goes on elsewhere reads the same."""
    found = [order().arranged(np.arange(35), (step, 1, 2)) for step in range(1, 7)]
    cuts = [len(parts_of(*each)[0]) for each in found]
    assert (cuts, [each[2] for each in found]) == (
        [15, 31, 7, 29, 23, 30],
        [False, False, False, True, False, True],
    )


def test_each_step_cuts_elsewhere_but_evaluation_does_not() -> None:
    tokens = torch.arange(40)[:, None].repeat(1, 2)
    batch = MicroBatch(tokens=tokens, targets=tokens.clone())
    first, again, second = (order().arrange(batch, step, [4, (0, 5)]) for step in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, second.tokens)
    assert not torch.equal(first.tokens[:, 0], first.tokens[:, 1])
    one, other = (order(varies=False).arrange(batch, step, [4, 5]) for step in (1, 2))
    assert torch.equal(one.tokens, other.tokens)
    # What was read stays as it was.
    assert torch.equal(batch.tokens, tokens)
    assert torch.equal(first.targets, tokens)


def test_stages_take_their_parts_of_a_step() -> None:
    tokens = torch.arange(40)[:, None].repeat(1, 2)
    read = [order().arrange(MicroBatch(tokens=tokens, targets=tokens), 1, [n, 9]) for n in (3, 4)]
    step = StepBatch.write(read.__getitem__, 2, step=1, replica=0, allocate=bytearray)
    wanted = Wanted(targets=False), Wanted(tokens=False)
    first, last = (step.on_host(each, pinned=False) for each in wanted)
    for before, of_first, of_last in zip(read, first, last, strict=True):
        assert before.sentences is not None
        assert of_first.sentences is not None
        assert of_last.sentences is not None
        assert torch.equal(of_first.tokens, before.tokens)
        assert torch.equal(of_first.sentences.segments, before.sentences.segments)
        assert torch.equal(of_last.sentences.swapped, before.sentences.swapped)
        assert not len(of_first.sentences.swapped)
        assert not len(of_last.sentences.segments)


ORDERED: dict[str, Any] = {
    **BERT,
    "model": {**BERT["model"], "vocab_size": 260, "sentence_order": True},  # type: ignore[dict-item]
    "data": {
        **BERT["data"],  # type: ignore[dict-item]
        "masked": {"fraction": 0.3, "mask_token": 256, "never": [258, 259]},
        "sentence_order": {"cls_token": 258, "sep_token": 259, "ends": [46]},
    },
}


def test_the_losses_of_bert_with_sentence_order_are_the_same_on_every_layout(
    ranks: RankPool, tmp_path: Path
) -> None:
    (dense,) = ranks.run(losses, 1, ORDERED, tmp_path / "dense")
    for name, parallel in LAYOUTS.items():
        spec = {**ORDERED, "parallel": parallel}
        size = parse_spec(spec).layout.world_size
        (found, *_) = ranks.run(losses, size, spec, tmp_path / name)
        assert found["loss"] == pytest.approx(dense["loss"], rel=1e-10), name
        assert found["held_out"] == pytest.approx(dense["held_out"], rel=1e-10), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_both_losses_are_summed_in_more_digits_than_they_are_made_of(
    ranks: RankPool, tmp_path: Path, precision: str
) -> None:
    (wide,) = ranks.run(losses, 1, ORDERED, tmp_path / "wide")
    spec = {**ORDERED, "precision": precision, "parallel": {"tp": 2, "pp": 2}}
    (found, *_) = ranks.run(losses, 4, spec, tmp_path / precision)
    assert found["loss"] == pytest.approx(wide["loss"], rel=0.01)
    assert found["held_out"] == pytest.approx(wide["held_out"], rel=0.01)
