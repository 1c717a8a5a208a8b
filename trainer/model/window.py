"""Causal attention in which each token sees itself and the window - 1 before it.

The work grows with sequence x window. Elsewhere than on CUDA, queries go in
blocks, each beside the keys that its window reaches, with a mask of that block's
size: there never is a mask of the whole sequence. On CUDA, FlexAttention skips
the blocks that the window hides.

Source: sliding windows as in Longformer (arXiv 2004.05150) and Mistral (2310.06825).
"""

# B micro-batch, H query heads, G key/value heads, S sequence, C head width.
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.model.alibi import ScoreMod
from trainer.model.fused import causal_mask

# A core takes queries, keys, values and a mask that says which keys a query may see.
Core = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Short blocks waste little of a window, but each is a call. A quarter of the window
# was the fastest or near it for windows of 256 and 1024; below 64 calls dominate.
_MIN_BLOCK = 64
# Queries and keys of a block of FlexAttention's: its own default, which its kernels fit.
FLEX_BLOCK = 128


def windowed_attention(
    q_BHSC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, window: int, core: Core
) -> Tensor:
    """`core` on each block of queries beside the keys that they may see."""
    block = max(_MIN_BLOCK, window // 4)
    # Split, not sliced: the backward pass of a slice fills a tensor as long as the
    # sequence, for each block; that of a split joins the blocks' gradients once.
    queries = torch.split(q_BHSC, block, dim=2)
    keys, values = torch.split(k_BGSC, block, dim=2), torch.split(v_BGSC, block, dim=2)
    outs = []
    for index, query in enumerate(queries):
        own = query.shape[2]
        reach = min(window - 1, index * block)
        key, value = (_join(blocks[: index + 1], reach + own) for blocks in (keys, values))
        mask = _window_mask(own, reach + own, window, device=query.device)
        outs.append(core(query, key, value, mask))
    return torch.cat(outs, dim=2)


def _join(blocks: Sequence[Tensor], length: int) -> Tensor:
    """The last `length` positions of some blocks."""
    first = len(blocks)
    found = 0
    while found < length:
        first -= 1
        found += blocks[first].shape[2]
    head = blocks[first]
    head = head.narrow(2, found - length, head.shape[2] - (found - length))
    return torch.cat((head, *blocks[first + 1 :]), dim=2)


# All blocks of a sequence but the first and last few have the same mask.
@functools.lru_cache(maxsize=16)
def _window_mask(queries: int, keys: int, window: int, *, device: torch.device) -> Tensor:
    """[queries, keys]; the last query stands at the last key."""
    return causal_mask(queries, keys, device=device).triu(keys - queries - window + 1)


def flex_attention(
    q_BHSC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    window: int,
    *,
    scale: float | None = None,
    compiled: bool = True,
) -> Tensor:
    """The same by FlexAttention's kernels; uncompiled they run anywhere, without their speed."""
    mask = window_block_mask(q_BHSC.shape[2], window, q_BHSC.device)
    return masked_flex_attention(q_BHSC, k_BGSC, v_BGSC, mask, scale=scale, compiled=compiled)


def masked_flex_attention(
    q_BHSC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    mask: Any,
    *,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    compiled: bool = True,
) -> Tensor:
    """FlexAttention with a `BlockMask`, and scores changed by `score_mod`."""
    out: Tensor = _flex(compiled=compiled)(
        q_BHSC,
        k_BGSC,
        v_BGSC,
        score_mod=score_mod,
        block_mask=mask,
        enable_gqa=q_BHSC.shape[1] != k_BGSC.shape[1],
        scale=scale,
    )
    return out


@functools.cache
def _flex(*, compiled: bool) -> Any:
    # Late, for CUDA only: it imports torch._dynamo (2.7 s), which no CPU worker needs.
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention) if compiled else flex.flex_attention


@functools.lru_cache(maxsize=16)
def window_block_mask(seq_len: int, window: int, device: torch.device) -> Any:
    """FlexAttention's `BlockMask` of a window, from the ends of its blocks.

    The same as `create_block_mask` gives, which asks about every pair of a query and a
    key and so makes a mask of the whole sequence. Here nothing is larger than one
    number for a pair of blocks of 128.
    """
    # Late, for CUDA only: see `_flex`.
    from torch.nn.attention.flex_attention import BlockMask

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window)

    firsts, lasts = block_ends(seq_len, device)
    whole = lasts - firsts == FLEX_BLOCK - 1
    # Queries go down, keys across.
    query_first, query_last, query_whole = (ends[:, None] for ends in (firsts, lasts, whole))
    some = (firsts <= query_last) & (lasts > query_first - window)
    every = query_whole & whole & (lasts <= query_first) & (firsts > query_last - window)
    return BlockMask.from_kv_blocks(
        *ordered_blocks(some & ~every),
        *ordered_blocks(every),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(seq_len, seq_len),
    )


def block_ends(seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first and the last place of each of FlexAttention's blocks."""
    firsts = torch.arange(0, seq_len, FLEX_BLOCK, device=device)
    return firsts, (firsts + FLEX_BLOCK).clamp(max=seq_len) - 1


def ordered_blocks(chosen_QK: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and which, for every head.

    `chosen_QK` may have a dim of the batch in front; without, it is for all of a batch.
    """
    chosen_QK = chosen_QK if chosen_QK.dim() == 3 else chosen_QK[None]
    counts = chosen_QK.sum(dim=-1, dtype=torch.int32)
    # The chosen ones first, each kind from left to right.
    order = chosen_QK.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counts[:, None], order.to(torch.int32)[:, None]
