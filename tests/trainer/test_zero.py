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
EVERY_WAY = tuple(
    replace(case, dtype="fp64")
    for case in (
        *SAME_SUMS,
        ZeroCase(level=2, reduce="micro_batch"),
        ZeroCase(level=3, reduce="micro_batch"),
        ZeroCase(level=3, reshard="micro_batch", reduce="micro_batch"),
    )
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
    dense = ranks.run_once(train_cases, 1, plain, (ZeroCase(dtype="fp64"),), 3)[0][0]
    results = ranks.run(train_cases, layout.layout.world_size, layout, EVERY_WAY, 3)
    for number, case in enumerate(EVERY_WAY):
        np.testing.assert_allclose(results[0][number]["curve"], dense["curve"], rtol=1e-9)
        weights = joined([found[number] for found in results])
        for parameter, values in joined([dense]).items():
            np.testing.assert_allclose(
                weights[parameter], values, rtol=1e-6, atol=1e-9, err_msg=f"{case} {parameter}"
            )


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
