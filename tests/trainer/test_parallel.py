"""Parallel equals dense: loss and every gradient, for every way to split the model.

fp64 within 1e-9 relative, fp32 within 1e-4: what remains is the order of sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outlast.layout import Layout
from tests.trainer.jobs import Case, loss_and_gradients
from tests.trainer.ranks import RankPool

LAYOUTS = {
    "tp2": Case(layout=Layout(tp=2), sequence_parallel=False),
    "tp2-sp": Case(layout=Layout(tp=2)),
    "tp4-sp": Case(layout=Layout(tp=4)),
    "pp2": Case(layout=Layout(pp=2)),
    "pp4": Case(layout=Layout(pp=4)),
    "pp2-gpipe": Case(layout=Layout(pp=2), schedule="gpipe"),
    "pp3-uneven": Case(layout=Layout(pp=3)),
    "pp3-given": Case(layout=Layout(pp=3), layer_split=(1, 2, 1)),
    "pp2-v2": Case(layout=Layout(pp=2), schedule="interleaved", virtual_stages=2),
    "pp2-v4": Case(layout=Layout(pp=2), schedule="interleaved", virtual_stages=4, layers=8),
    # Three micro-batches on two stages: one round, and longer than the pipeline.
    "pp2-v2-rest": Case(
        layout=Layout(pp=2), schedule="interleaved", virtual_stages=2, global_batch=6
    ),
    "pp3-v2-given": Case(
        layout=Layout(pp=3),
        schedule="interleaved",
        virtual_stages=2,
        layers=8,
        layer_split=(1, 2, 1, 1, 2, 1),
    ),
    "pp2-zb": Case(layout=Layout(pp=2), schedule="zb-h1"),
    "pp4-zb": Case(layout=Layout(pp=4), schedule="zb-h1", global_batch=16),
    "tp2-pp2-zb-sp": Case(layout=Layout(tp=2, pp=2), schedule="zb-h1"),
    "pp2-zbv": Case(layout=Layout(pp=2), schedule="zb-v", virtual_stages=2),
    "pp2-zbv-untied": Case(layout=Layout(pp=2), schedule="zb-v", virtual_stages=2, tied=False),
    # Chunks of different sizes, and fewer micro-batches than stages.
    "pp3-zbv-few": Case(
        layout=Layout(pp=3),
        schedule="zb-v",
        virtual_stages=2,
        layers=8,
        layer_split=(1, 2, 1, 1, 2, 1),
        global_batch=4,
    ),
    "pp4-zbv": Case(
        layout=Layout(pp=4), schedule="zb-v", virtual_stages=2, layers=8, global_batch=20
    ),
    "tp2-pp2-dp2-zbv": Case(
        layout=Layout(tp=2, pp=2, dp=2),
        schedule="zb-v",
        virtual_stages=2,
        sequence_parallel=False,
        global_batch=16,
    ),
    "tp2-pp2-dp2-zbv-sp": Case(
        layout=Layout(tp=2, pp=2, dp=2), schedule="zb-v", virtual_stages=2, global_batch=16
    ),
    "dp2": Case(layout=Layout(dp=2)),
    "dp4": Case(layout=Layout(dp=4)),
    "cp2": Case(layout=Layout(dp=2, cp=2)),
    "cp4": Case(layout=Layout(dp=4, cp=4)),
    "cp2-ring": Case(layout=Layout(dp=2, cp=2), context="ring"),
    # More ranks than the model has heads.
    "cp8-ring": Case(layout=Layout(dp=8, cp=8), seq_len=16, context="ring"),
    "cp2-ring-tp2-pp2-dp2-sp": Case(layout=Layout(tp=2, pp=2, dp=4, cp=2), context="ring"),
    "cp2-tp2-sp": Case(layout=Layout(tp=2, dp=2, cp=2)),
    "cp2-tp2-pp2-dp2-v2-sp": Case(
        layout=Layout(tp=2, pp=2, dp=4, cp=2), schedule="interleaved", virtual_stages=2
    ),
    "tp2-pp2-dp2": Case(layout=Layout(tp=2, pp=2, dp=2), sequence_parallel=False),
    "tp2-pp2-dp2-sp": Case(layout=Layout(tp=2, pp=2, dp=2)),
    "tp2-pp2-dp2-v2": Case(
        layout=Layout(tp=2, pp=2, dp=2),
        schedule="interleaved",
        virtual_stages=2,
        sequence_parallel=False,
    ),
    "tp2-pp2-dp2-v2-sp": Case(
        layout=Layout(tp=2, pp=2, dp=2), schedule="interleaved", virtual_stages=2
    ),
}
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4}
# fp32 differs from fp64 in rounding only: the two layouts with most communication cover it.
FP32 = ("tp2-sp", "tp2-pp2-dp2-sp", "cp2-tp2-sp", "cp2-ring")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "fp64") for name in LAYOUTS), *((name, "fp32") for name in FP32)],
)
def test_parallel_equals_dense(ranks: RankPool, name: str, tied: bool, dtype: str) -> None:
    case = replace(LAYOUTS[name], tied=tied, dtype=dtype)
    found = ranks.run_once(loss_and_gradients, case.layout.world_size, case)
    dense = _dense(ranks, case)

    assert {result["loss"] for result in found} == {found[0]["loss"]}
    assert found[0]["loss"] == pytest.approx(dense["loss"], rel=TOLERANCE[dtype])
    assert found[0]["norm"] == pytest.approx(dense["norm"], rel=TOLERANCE[dtype])
    for parameter, (_, _, expected) in dense["gradients"].items():
        joined = _joined(parameter, found)
        assert np.abs(joined - expected).max() <= TOLERANCE[dtype] * np.abs(expected).max(), (
            parameter
        )


def test_copies_of_a_gradient_are_bitwise_equal(ranks: RankPool) -> None:
    """Replicas, replicated tensors and both copies of a tied embedding never drift apart."""
    case = LAYOUTS["tp2-pp2-dp2-sp"]
    found = ranks.run_once(loss_and_gradients, 8, case)
    seen: dict[tuple[str, tuple[int, ...]], bytes] = {}
    copies = 0
    for result in found:
        for name, (_, offsets, gradient) in result["gradients"].items():
            bits = gradient.tobytes()
            copies += (name, offsets) in seen
            assert seen.setdefault((name, offsets), bits) == bits, name
    assert copies > 0


def test_same_layout_twice_gives_the_same_bits(ranks: RankPool) -> None:
    case = replace(LAYOUTS["tp2-pp2-dp2-sp"], dtype="fp32")
    first = ranks.run_once(loss_and_gradients, 8, case)
    second = ranks.run(loss_and_gradients, 8, case)
    for one, other in zip(first, second, strict=True):
        assert one["loss"] == other["loss"]
        assert one["norm"] == other["norm"]
        for name, (_, _, gradient) in one["gradients"].items():
            assert gradient.tobytes() == other["gradients"][name][2].tobytes(), name


def _dense(ranks: RankPool, case: Case) -> Any:
    # What only the layout uses must not make a new dense case.
    plain = replace(
        case,
        layout=Layout(),
        context="all_to_all",
        sequence_parallel=True,
        schedule="1f1b",
        virtual_stages=1,
        layer_split=None,
    )
    return ranks.run_once(loss_and_gradients, 1, plain)[0]


def _joined(name: str, found: list[Any]) -> Any:
    """The full gradient of a parameter from all ranks' shards."""
    shards = [result["gradients"][name] for result in found if name in result["gradients"]]
    full = np.full(shards[0][0], np.nan)
    for _, offsets, part in shards:
        place = tuple(
            slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True)
        )
        full[place] = part
    return full
