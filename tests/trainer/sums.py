"""What operations of a group of two have to give, by numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def check_collectives(found: Sequence[Mapping[str, Any]]) -> None:
    """Hold what both ranks got from `jobs_tensor.collectives_of` to what they brought.

    Two members: no order of sums to differ in.
    """
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
