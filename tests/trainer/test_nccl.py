"""What `NcclComm` asks of its backend, asked of gloo's: a GPU would run the same calls.

What only a GPU can show, the order of streams, no test here shows.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.jobs_tensor import LinearCase, linear_layers, native_collectives
from tests.trainer.ranks import RankPool


@pytest.mark.parametrize("kind", ["column", "row"])
def test_native_operations_mean_what_those_over_gloo_mean(ranks: RankPool, kind: str) -> None:
    """Two members: no order of sums to differ in."""
    case = LinearCase(kind=kind, sequence_parallel=True, chunks=4)
    found = ranks.run(native_collectives, 2, case)
    own = [result["own"] for result in found]
    total = own[0] + own[1]
    for rank, result in enumerate(found):
        gathered = np.concatenate([part[:5] for part in own])
        np.testing.assert_array_equal(result["all_gather"], gathered)
        np.testing.assert_array_equal(result["start_all_gather"], gathered)
        np.testing.assert_array_equal(result["reduce_scatter"], np.split(total, 2)[rank])
        np.testing.assert_array_equal(result["start_reduce_scatter"], np.split(total, 2)[rank])
        np.testing.assert_allclose(result["rounded"], np.split(total, 2)[rank], atol=0.05)
        np.testing.assert_array_equal(result["all_reduce"], total)
        np.testing.assert_array_equal(result["all_reduce_max"], np.maximum(*own))
        np.testing.assert_array_equal(result["broadcast"], own[1])
    for native, (expected,) in zip(found, ranks.run(linear_layers, 2, (case,)), strict=True):
        for name in ("out", "x", "weight", "bias"):
            np.testing.assert_array_equal(native["layer"][name], expected[name])
