"""Copies between tensors in host memory have the bits that torch's own copy gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from checkpoint.stage.hostcopy import Copy, FasterCopy, copy_by_memmove, copy_by_torch

_RANDOM = torch.Generator().manual_seed(3)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=_RANDOM).to(dtype)


_EITHER_WAY = pytest.mark.parametrize("copy", [copy_by_memmove, copy_by_torch])


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(noise(5, 7), id="contiguous"),
        pytest.param(noise(5, 7, dtype=torch.bfloat16), id="bf16"),
        pytest.param(noise(5, 7).t(), id="transposed"),
        pytest.param(noise(10, 7)[::2], id="strided"),
        pytest.param(noise(0, 7), id="empty"),
        pytest.param(noise(1)[0], id="a number"),
        pytest.param(torch.nn.Parameter(noise(3, 4)), id="parameter"),
        pytest.param(torch.full((3,), float("nan")), id="NaN"),
    ],
)
@pytest.mark.parametrize("is_dense", [True, False])
@_EITHER_WAY
def test_a_copy_has_the_bits_of_its_source(copy: Copy, source: Tensor, is_dense: bool) -> None:
    room = torch.zeros(*source.shape, 2, dtype=source.dtype)
    into = torch.zeros(source.shape, dtype=source.dtype) if is_dense else room[..., 0]
    copy([into], [source])
    expected = torch.zeros(source.shape, dtype=source.dtype).copy_(source.detach())
    assert torch.equal(into.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert not room[..., 1].any()


@_EITHER_WAY
def test_another_type_is_converted(copy: Copy) -> None:
    source = noise(4, 4)
    into = torch.zeros(4, 4, dtype=torch.bfloat16)
    copy([into], [source])
    assert torch.equal(into, source.to(torch.bfloat16))


@_EITHER_WAY
def test_a_conjugated_view_is_copied_as_what_it_stands_for(copy: Copy) -> None:
    source = torch.complex(noise(4), noise(4)).conj()
    into = torch.zeros(4, dtype=source.dtype)
    copy([into], [source])
    assert torch.equal(into, source.resolve_conj())


@_EITHER_WAY
def test_every_pair_is_copied(copy: Copy) -> None:
    sources = [noise(3), noise(2, 2)]
    targets = [torch.zeros(3), torch.zeros(2, 2)]
    copy(targets, sources)
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))


class _Machine:
    """Where one way of copying takes so many seconds, and the other so many."""

    def __init__(self, *seconds: float) -> None:
        self.now_s = 0.0
        self.taken: list[int] = []
        self.copy = FasterCopy([self._way(each, s) for each, s in enumerate(seconds)], self._clock)

    def _way(self, index: int, seconds: float) -> Copy:
        def copy(into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
            self.now_s += seconds
            self.taken.append(index)
            copy_by_torch(into, sources)

        return copy

    def _clock(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("seconds", "faster"), [((1.0, 2.0), 0), ((2.0, 1.0), 1)])
def test_large_copies_go_the_faster_way_once_both_were_tried(
    seconds: tuple[float, float], faster: int
) -> None:
    machine = _Machine(*seconds)
    source = noise(2 << 20)
    for _ in range(12):
        into = torch.zeros_like(source)
        machine.copy([into], [source])
        assert torch.equal(into, source)
    assert machine.taken == [0, 1, 0, 1, 0, 1, 0, 1, *4 * [faster]]


def test_small_copies_say_nothing_about_either_way() -> None:
    machine = _Machine(2.0, 1.0)
    for _ in range(20):
        machine.copy([torch.zeros(3)], [noise(3)])
    assert set(machine.taken) == {0}
