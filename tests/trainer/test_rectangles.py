"""A range of a tensor's elements as rectangles: all of them, once, in order, and few."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.core.rectangles import boxes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_cover_a_range_exactly(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers = np.arange(size).reshape(shape)
    found = list(boxes(shape, start, stop))
    covered = []
    for box in found:
        place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape, strict=True))
        inside = numbers[place].reshape(-1).tolist()
        assert inside[0] == box.start
        covered += inside
    assert covered == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1


def test_a_matrix_is_cut_into_row_ends_and_whole_rows() -> None:
    found = [(box.offsets, box.shape) for box in boxes((4, 3), 1, 11)]
    assert found == [((0, 1), (1, 2)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
