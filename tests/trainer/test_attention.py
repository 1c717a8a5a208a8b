"""Windows, rotary positions and explicit weights, beside attention with a dense mask."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model.alibi import distance_score, head_slopes
from trainer.model.attention import (
    biased_attention,
    distance_attention,
    masked_sdpa,
    weighted_attention,
)
from trainer.model.config import RopeConfig
from trainer.model.rope import rotate, rotated_width
from trainer.model.window import (
    flex_attention,
    masked_flex_attention,
    window_block_mask,
    windowed_attention,
)


def _qkv(seq_len: int, *, heads: int = 4, groups: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seq_len)
    return tuple(
        torch.randn(2, count, seq_len, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for count in (heads, groups, groups)
    )


def _dense(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    index = torch.arange(q.shape[2])
    ahead = index[:, None] - index
    mask = (ahead >= 0) & (ahead < window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize(
    ("seq_len", "window"), [(200, 1), (200, 7), (200, 64), (200, 100), (130, 300), (512, 256)]
)
def test_window_equals_a_dense_mask_forward_and_backward(seq_len: int, window: int) -> None:
    inputs = _qkv(seq_len)
    found = windowed_attention(*inputs, window, masked_sdpa)
    expected = _dense(*inputs, window)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    weights = torch.linspace(0.5, 2.0, found.numel(), dtype=torch.float64).view(found.shape)
    for own, other in zip(
        torch.autograd.grad(found, inputs, weights),
        torch.autograd.grad(expected, inputs, weights),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)


def test_work_of_a_window_grows_linearly_with_the_sequence() -> None:
    """Twice the sequence, twice the work, forward and backward."""
    works = [_work(seq_len, window=128) for seq_len in (1024, 2048, 4096)]
    # The first blocks see fewer keys, hence a little more than twice.
    assert works[1] / works[0] == pytest.approx(2.0, rel=0.08)
    assert works[2] / works[1] == pytest.approx(2.0, rel=0.04)


def _work(seq_len: int, *, window: int) -> int:
    """Scores computed and numbers written in one forward and backward."""
    inputs = _qkv(seq_len)
    with _Work() as work:
        windowed_attention(*inputs, window, masked_sdpa).sum().backward()
    assert work.scores > 0
    return work.scores + work.written


class _Work(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.scores = 0
        self.written = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "scaled_dot_product" in str(func):
            # The backward operation has the gradient before them.
            query, key = args[1:3] if "backward" in str(func) else args[:2]
            self.scores += query.numel() // query.shape[-1] * key.shape[2]
        outs = out if isinstance(out, (tuple, list)) else (out,)
        sizes = [tensor.numel() for tensor in outs if isinstance(tensor, Tensor)]
        self.written += sum(sizes)
        self.largest = max(self.largest, *sizes, 0)
        return out


@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("heads", [4, 6])
def test_scores_fall_with_the_distance(heads: int, window: int | None) -> None:
    """ALiBi's definition, and slopes as its paper gives them for 4 heads and its code for 6."""
    q, k, v = _qkv(200, heads=heads)
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3][:heads], dtype=q.dtype)
    index = torch.arange(200)
    ahead = index[:, None] - index
    allowed = (ahead >= 0) & (ahead < (window or 200))
    bias = (-slopes[:, None, None] * ahead).masked_fill(~allowed, -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)

    found = distance_attention(q, k, v, head_slopes(heads), window, masked_sdpa)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    generator = torch.Generator().manual_seed(0)
    core = partial(biased_attention, rate=0.0, generator=generator, scale=None)
    found = distance_attention(q, k, v, head_slopes(heads), window, core)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    # What runs on CUDA: uncompiled and forward only is what it can do on CPU.
    mask = window_block_mask(200, window or 200, q.device)
    score = distance_score(head_slopes(heads), q.device)
    single = [each.detach().float() for each in (q, k, v)]
    flex = masked_flex_attention(*single, mask, score_mod=score, compiled=False)
    torch.testing.assert_close(flex, expected.float(), rtol=1e-4, atol=1e-5)


def test_flex_attention_sees_the_same_window() -> None:
    """Uncompiled and forward only: that is what it can do on CPU."""
    q, k, v = (tensor.detach().float() for tensor in _qkv(256))
    found = flex_attention(q, k, v, 100, compiled=False)
    torch.testing.assert_close(found, _dense(q, k, v, 100), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("seq_len", "window"),
    [(128, 1), (512, 128), (512, 129), (640, 200), (300, 100), (1000, 256), (100, 500), (700, 700)],
)
def test_block_mask_by_arithmetic_is_that_of_every_pair(seq_len: int, window: int) -> None:
    found = window_block_mask(seq_len, window, torch.device("cpu"))
    index = torch.arange(seq_len)
    ahead = index[:, None] - index
    assert found.mask_mod is not None
    visible = found.mask_mod(index[0], index[0], index[:, None], index)
    assert torch.equal(visible, (ahead >= 0) & (ahead < window))
    expected = create_block_mask(found.mask_mod, None, None, seq_len, seq_len, device="cpu")
    assert found.shape == expected.shape
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        for part in (name, f"full_{name}"):
            own, other = getattr(found, part), getattr(expected, part)
            assert (own.dtype, own.device) == (other.dtype, other.device)
            assert torch.equal(own, other), part


def test_no_part_of_a_block_mask_is_as_large_as_the_sequence_squared() -> None:
    """Of 16k tokens a mask of all pairs has 2**28 numbers, one of all pairs of blocks 2**14."""
    with _Work() as work:
        window_block_mask(2**14, 1024, torch.device("cpu"))
    # torch puts one more column beside the blocks when it turns them around.
    assert work.largest <= 129 * 128


def test_spelled_out_weights_equal_sdpa_where_nothing_is_dropped() -> None:
    q, k, v = _qkv(32)
    generator = torch.Generator().manual_seed(0)
    found = weighted_attention(q, k, v, None, rate=0.0, generator=generator)
    torch.testing.assert_close(found, _dense(q, k, v, 32), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("width", "fraction", "rotated"),
    # As a float, 0.58 x 100 is a little less than 58.
    [(100, 0.58, 58), (100, 0.14, 14), (96, 0.333333, 32), (64, 0.25, 16), (8, 1.0, 8)],
)
def test_as_many_values_turn_as_the_fraction_says(
    width: int, fraction: float, rotated: int
) -> None:
    assert rotated_width(width, RopeConfig(theta=1e4, fraction=fraction, pairs="halves")) == rotated


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_rotated_products_depend_on_the_distance_only(pairs: Any) -> None:
    """RoFormer's defining property; what is not rotated stays as it was."""
    config = RopeConfig(theta=100.0, fraction=0.75, pairs=pairs)
    row = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turned = rotate(row.expand(10, 1, 1, 8), config)[:, 0, 0]
    torch.testing.assert_close(turned[0], row)
    torch.testing.assert_close(turned[:, 6:], row[6:].expand(10, 2))
    products = turned @ turned.T
    for distance in range(10):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert products[0, 1] != pytest.approx(products[0, 2].item())
