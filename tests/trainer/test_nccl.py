"""What `NcclComm` asks of its backend, asked of gloo's: a GPU would run the same calls.

What only a GPU can show, the order of streams, no test here shows.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.jobs_tensor import LinearCase, linear_layers, native_collectives
from tests.trainer.ranks import RankPool
from tests.trainer.sums import check_collectives


@pytest.mark.parametrize("kind", ["column", "row"])
def test_native_operations_mean_what_those_over_gloo_mean(ranks: RankPool, kind: str) -> None:
    """Two members: no order of sums to differ in."""
    case = LinearCase(kind=kind, sequence_parallel=True, chunks=4)
    found = ranks.run(native_collectives, 2, case)
    check_collectives(found)
    for native, (expected,) in zip(found, ranks.run(linear_layers, 2, (case,)), strict=True):
        for name in ("out", "x", "weight", "bias"):
            np.testing.assert_array_equal(native["layer"][name], expected[name])
