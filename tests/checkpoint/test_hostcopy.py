"""Copies between tensors in host memory have the bits that torch's own copy gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checkpoint.stage.hostcopy import copy_host_tensors

_RANDOM = torch.Generator().manual_seed(3)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=_RANDOM).to(dtype)


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
def test_a_copy_has_the_bits_of_its_source(source: Tensor, is_dense: bool) -> None:
    room = torch.zeros(*source.shape, 2, dtype=source.dtype)
    into = torch.zeros(source.shape, dtype=source.dtype) if is_dense else room[..., 0]
    copy_host_tensors([(into, source)])
    expected = torch.zeros(source.shape, dtype=source.dtype).copy_(source.detach())
    assert torch.equal(into.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert not room[..., 1].any()


def test_another_type_is_converted() -> None:
    source = noise(4, 4)
    into = torch.zeros(4, 4, dtype=torch.bfloat16)
    copy_host_tensors([(into, source)])
    assert torch.equal(into, source.to(torch.bfloat16))


def test_a_conjugated_view_is_copied_as_what_it_stands_for() -> None:
    source = torch.complex(noise(4), noise(4)).conj()
    into = torch.zeros(4, dtype=source.dtype)
    copy_host_tensors([(into, source)])
    assert torch.equal(into, source.resolve_conj())


def test_every_pair_is_copied() -> None:
    sources = [noise(3), noise(2, 2)]
    targets = [torch.zeros(3), torch.zeros(2, 2)]
    copy_host_tensors(zip(targets, sources, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))
