"""ZeRO 0 to 3: the same training, whatever replicas share (arXiv 1910.02054)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outlast.layout import Layout
from tests.trainer.jobs import Case
from tests.trainer.jobs_zero import ZeroCase, train_cases
from tests.trainer.ranks import RankPool

LAYOUTS = {
    "dp2": Case(layout=Layout(dp=2)),
    "dp4": Case(layout=Layout(dp=4), tied=False),
    "tp2-dp2-sp": Case(layout=Layout(tp=2, dp=2)),
    "pp2-dp2": Case(layout=Layout(pp=2, dp=2)),
    "tp2-pp2-dp2-sp": Case(layout=Layout(tp=2, pp=2, dp=2)),
}
SAME_SUMS = (
    ZeroCase(),
    ZeroCase(level=1),
    ZeroCase(level=2),
    ZeroCase(level=3),
    ZeroCase(level=3, reshard="micro_batch"),
)
# The other ways have the bits of one of these.
DENSE = (
    ZeroCase(level=1, dtype="fp64"),
    ZeroCase(level=2, dtype="fp64", reduce="micro_batch"),
    ZeroCase(level=3, dtype="fp64", reshard="micro_batch", reduce="micro_batch"),
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_level_has_the_same_bits(ranks: RankPool, name: str) -> None:
    """fp32, five steps of AdamW: sums over replicas are in rank order at every level."""
    layout = LAYOUTS[name]
    results = ranks.run(train_cases, layout.layout.world_size, layout, SAME_SUMS, 5)
    for number in range(1, len(SAME_SUMS)):
        for found in results:
            assert found[number]["curve"] == found[0]["curve"], SAME_SUMS[number]
        expected = joined([found[0] for found in results])
        for parameter, values in joined([found[number] for found in results]).items():
            assert values.tobytes() == expected[parameter].tobytes(), parameter


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_level_trains_as_the_dense_model(ranks: RankPool, name: str) -> None:
    layout = LAYOUTS[name]
    plain = Case(layout=Layout(), tied=layout.tied)
    dense = ranks.run_once(train_cases, 1, plain, (ZeroCase(dtype="fp64"),), 2)[0][0]
    results = ranks.run(train_cases, layout.layout.world_size, layout, DENSE, 2)
    for number, case in enumerate(DENSE):
        np.testing.assert_allclose(results[0][number]["curve"], dense["curve"], rtol=1e-9)
        weights = joined([found[number] for found in results])
        for parameter, values in joined([dense]).items():
            np.testing.assert_allclose(
                weights[parameter], values, rtol=1e-6, atol=1e-9, err_msg=f"{case} {parameter}"
            )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pp2-dp2", {"virtual_stages": 2}),
        ("dp2", {"recompute": "full"}),
        ("pp2-dp2", {"recompute": "offload"}),
        ("tp2-dp2-sp", {"recompute": "selective", "block": "parallel"}),
    ],
    ids=["virtual-stages", "full-recompute", "offload", "parallel-block"],
)
def test_levels_agree_whatever_a_chunk_does(
    ranks: RankPool, name: str, change: dict[str, Any]
) -> None:
    """Several chunks on a rank, weights that are used once more, one fused projection."""
    layout = LAYOUTS[name]
    cases = tuple(replace(case, **change) for case in SAME_SUMS)
    first, *others = ranks.run(train_cases, layout.layout.world_size, layout, cases, 3)[0]
    for found in others:
        assert found["curve"] == first["curve"]


def test_bytes_are_those_of_the_formula(ranks: RankPool) -> None:
    """2 (d-1)/d of all parameters at levels 0 to 2, 3 (d-1)/d at level 3 (arXiv 1910.02054, 7)."""
    cases = [
        ZeroCase(level=level, reshard="micro_batch", hidden=128, layers=2) for level in range(4)
    ]
    for replicas in (2, 4):
        one_micro_batch = Case(layout=Layout(dp=replicas), global_batch=replicas, micro_batch=1)
        results = ranks.run(train_cases, replicas, one_micro_batch, tuple(cases), 2)
        for case, found in zip(cases, results[0], strict=True):
            exchanges = 3 if case.level == 3 else 2
            formula = exchanges * (replicas - 1) / replicas * 4 * sum(found["elements"])
            assert found["bytes"] == pytest.approx(formula, rel=0.1), case


def test_bf16_on_the_wire_halves_the_bytes_of_gradients(ranks: RankPool) -> None:
    layout = Case(layout=Layout(dp=2))
    cases = tuple(ZeroCase(level=level, wire=wire) for level in (0, 2) for wire in (None, "bf16"))
    plain, halved, plain_2, halved_2 = ranks.run(train_cases, 2, layout, cases, 3)[0]
    assert halved["bytes"] == pytest.approx(plain["bytes"] / 2, rel=0.05)
    assert halved_2["bytes"] == pytest.approx(plain_2["bytes"] * 3 / 4, rel=0.05)
    np.testing.assert_allclose(halved["curve"], plain["curve"], rtol=1e-2)
    np.testing.assert_allclose(halved_2["curve"], plain["curve"], rtol=1e-2)


def test_level_3_holds_two_blocks_and_one_end_at_most(ranks: RankPool) -> None:
    case = ZeroCase(level=3, reshard="micro_batch", reduce="micro_batch", layers=8)
    found = ranks.run(train_cases, 2, Case(layout=Layout(dp=2)), (case,), 2)[0][0]
    block = max(found["blocks"])
    embedding, *_, output = found["elements"]
    assert len(found["blocks"]) == 8
    assert found["most_gathered"] == max(
        2 * block + max(embedding, output), block + embedding + output
    )


def test_bf16_trains_close_to_fp32(ranks: RankPool) -> None:
    """Masters and sums in fp32; every level has the same bits here too."""
    layout = LAYOUTS["dp2"]
    cases = (ZeroCase(), *(replace(case, dtype="bf16") for case in SAME_SUMS))
    results = ranks.run(train_cases, layout.layout.world_size, layout, cases, 5)
    exact, *rounded = results[0]
    losses = [loss for loss, _ in exact["curve"]]
    assert losses[-1] < losses[0]
    np.testing.assert_allclose([loss for loss, _ in rounded[0]["curve"]], losses, rtol=2e-2)
    for found in rounded[1:]:
        assert found["curve"] == rounded[0]["curve"]


def joined(results: list[Any]) -> dict[str, Any]:
    """Whole tensors from the shards of all ranks; every element must be there."""
    tensors: dict[str, Any] = {}
    for result in results:
        for name, shape, offsets, values in result["shards"]:
            whole = tensors.setdefault(name, np.full(shape, np.nan, dtype=values.dtype))
            place = tuple(
                slice(start, start + size)
                for start, size in zip(offsets, values.shape, strict=True)
            )
            whole[place] = values
    assert not any(np.isnan(whole).any() for whole in tensors.values())
    return tensors
