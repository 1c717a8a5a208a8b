"""The benchmark of projections measures what it says."""

from __future__ import annotations

import pytest

from bench.plan.__main__ import spearman
from bench.plan.layouts import RANKS, layouts, name_of


def test_every_mesh_is_measured_once_with_each_schedule() -> None:
    found = layouts()
    names = [name_of(spec) for spec in found]
    assert len(set(names)) == len(names)
    assert {spec.layout.world_size for spec in found} == {RANKS}
    assert {"tp8", "cp8", "dp8", "pp8 1f1b", "pp8 zb-h1", "tp2 cp2 pp2 zb-v"} <= set(names)
    # Eight stages of two chunks are more than the model has layers.
    assert "pp8 zb-v" not in names


def test_order_is_what_is_correlated() -> None:
    assert spearman([1.0, 2.0, 3.0], [10.0, 11.0, 900.0]) == pytest.approx(1.0)
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    # 1 - 6 sum(d^2) / (n (n^2 - 1)) of one swap among four.
    assert spearman([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(0.8)
