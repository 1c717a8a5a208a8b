"""Dropout's masks over ranks and micro-batches, and recomputation that repeats them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.jobs_model import DropCase, dropout_run
from tests.trainer.ranks import RankPool
from trainer.model.dropout import DropoutKey, keep_mask

CPU = torch.device("cpu")


def test_ranks_drop_alike_exactly_where_they_share_a_tensor(ranks: RankPool) -> None:
    """The stream is shared without sequence parallelism; attention weights never are."""
    shared = _masks(ranks.run_once(dropout_run, 2, DropCase(sequence_parallel=False)))
    split = _masks(ranks.run_once(dropout_run, 2, DropCase()))
    assert shared[0].keys() == split[0].keys() == shared[1].keys()
    for site in shared[0]:
        assert (shared[0][site] == shared[1][site]) == ("weights" not in site), site
        assert split[0][site] != split[1][site], site


def test_parts_of_a_sequence_have_masks_of_their_own(ranks: RankPool) -> None:
    for case in (DropCase(cp=2), DropCase(cp=2, sequence_parallel=False)):
        masks = _masks(ranks.run_once(dropout_run, 4, case))
        # Ranks 0 and 2 are the same tensor rank, and have a part each.
        for one, other in ((0, 2), (1, 3)):
            assert masks[one].keys() == masks[other].keys()
            assert all(masks[one][site] != masks[other][site] for site in masks[one])


def test_every_place_and_micro_batch_has_a_mask_of_its_own(ranks: RankPool) -> None:
    (masks,) = _masks(ranks.run_once(dropout_run, 1, DropCase()))
    # Two micro-batches: the embedding, and of two layers weights and both branches.
    assert len(masks) == 2 * (1 + 2 * 3)
    assert len(set(masks.values())) == len(masks)


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (1, DropCase(window=5)),
        (2, DropCase()),
        (2, DropCase(block="parallel", sequence_parallel=False)),
        (2, DropCase(dropout=0.0, attention_dropout=0.0)),
        (4, DropCase(cp=2)),
        (2, DropCase(cp=2, block="parallel", window=5)),
    ],
    ids=["window", "tp2-sp", "parallel-tp2", "no dropout", "cp2-tp2-sp", "parallel-cp2"],
)
def test_recomputed_gradients_are_bitwise_those_of_none(
    ranks: RankPool, mode: str, world_size: int, case: DropCase
) -> None:
    kept = ranks.run_once(dropout_run, world_size, case)
    again = ranks.run_once(dropout_run, world_size, replace(case, recompute=mode))
    for one, other in zip(kept, again, strict=True):
        assert one["losses"] == other["losses"]
        # A late import would cost every restarted worker seconds.
        assert other["heavy"] == []
        # Masks of both micro-batches are drawn again, though the second began last.
        assert set(other["repeated"]) <= set(one["masks"])
        assert bool(other["repeated"]) == (case.dropout > 0)
        for name, gradient in one["gradients"].items():
            assert gradient.tobytes() == other["gradients"][name].tobytes(), name


def test_an_evaluation_drops_nothing(ranks: RankPool) -> None:
    (result,) = ranks.run_once(dropout_run, 1, DropCase())
    plain = DropCase(dropout=0.0, attention_dropout=0.0)
    (without,) = ranks.run_once(dropout_run, 1, plain)
    # Explicit attention weights and SDPA round differently only where something is dropped.
    assert result["evaluated"] == without["evaluated"]
    assert result["losses"] != without["losses"]


def test_a_mask_keeps_the_mean() -> None:
    key = DropoutKey(seed=1, step=2, micro_batch=3)
    like = torch.empty(200, 200, dtype=torch.float64)
    mask = keep_mask(like, 0.25, key.generator("site", None, CPU))
    assert set(np.unique(mask.numpy())) == {0.0, 1 / 0.75}
    # Four standard deviations of the mean of 40,000 draws.
    assert mask.mean().item() == pytest.approx(1.0, abs=4 * (0.25 / 0.75 / 40_000) ** 0.5)
    again = keep_mask(like, 0.25, key.generator("site", None, CPU))
    assert torch.equal(mask, again)


def _masks(results: list[Any]) -> list[dict[str, bytes]]:
    """Of every rank: the first draws of its generators, by place."""
    return [{name: sample for name, _, sample in result["masks"]} for result in results]
