"""Documents in one row of tokens: what a query may see, and where a token stands.

All follows from one number for each token, the place of its document's first one. On CUDA,
FlexAttention skips the blocks of keys that no query of a block may see; elsewhere there is a mask
of the whole sequence, the same for all layers and kept for the backward pass.
"""

# B micro-batch, S sequence, Q queries, K keys.
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainer.model.alibi import distance_bias
from trainer.model.window import FLEX_BLOCK, block_ends, ordered_blocks


class Documents:
    """The documents of a micro-batch."""

    def __init__(
        self,
        starts_SB: Tensor,
        *,
        bidirectional: bool = False,
        apart: bool = True,
        resets_positions: bool = True,
    ) -> None:
        """For each token where its document begins in the sequence, 0 if that is before it.

        `bidirectional`: a query sees all of its document, and not only what is before it.
        `apart`: it sees no other document.
        """
        self._bidirectional = bidirectional
        self.starts_BS = starts_SB.t().contiguous()
        self.are_apart = apart
        """If not, attention is that of a sequence without documents, and there is no mask."""
        index = torch.arange(len(starts_SB), device=starts_SB.device)
        self.positions_SB = index[:, None] - starts_SB if resets_positions else None
        """Counted from the first token of each document that is in the sequence; None: from the
        sequence's."""
        self._masks: dict[int | None, Any] = {}
        self._biases: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        """[B, 1, Q, K]: True where a query may look."""
        if window not in self._masks:
            starts_BS = self.starts_BS
            if self._bidirectional:
                assert window is None
                self._masks[window] = (starts_BS[:, :, None] == starts_BS[:, None])[:, None]
                return self.mask(window)
            index = torch.arange(starts_BS.shape[1], device=starts_BS.device)
            ahead = index[:, None] - index
            allowed = (ahead >= 0) & (index >= starts_BS[:, :, None])
            if window is not None:
                allowed &= ahead < window
            self._masks[window] = allowed[:, None]
        found: Tensor = self._masks[window]
        return found

    def bias(self, window: int | None, slopes: tuple[float, ...], like: Tensor) -> Tensor:
        """[B, H, Q, K]: what ALiBi adds to a score, -inf where a query may not look."""
        if window not in self._biases:
            seq_len = self.starts_BS.shape[1]
            whole = distance_bias(slopes, seq_len, seq_len, like)
            self._biases[window] = whole.masked_fill(~self.mask(window), -math.inf)
        return self._biases[window]

    def block_mask(self, window: int | None) -> Any:
        """The same as FlexAttention's `BlockMask`, from the ends of its blocks."""
        if window not in self._masks:
            starts_BS = self.starts_BS
            self._masks[window] = (
                _same_document(starts_BS) if self._bidirectional else _block_mask(starts_BS, window)
            )
        return self._masks[window]


def _block_mask(starts_BS: Tensor, window: int | None) -> Any:
    # Late, for CUDA only: it imports torch._dynamo (2.7 s), which no CPU worker needs.
    from torch.nn.attention.flex_attention import BlockMask

    seq_len = starts_BS.shape[1]
    reach = seq_len if window is None else window

    def visible(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - reach) & (key >= starts_BS[batch, query])

    firsts, lasts = block_ends(seq_len, starts_BS.device)
    whole = lasts - firsts == FLEX_BLOCK - 1
    query_first, query_last, query_whole = (ends[:, None] for ends in (firsts, lasts, whole))
    # Documents begin ever later, so those of a block's ends are the first and the last.
    begins_first, begins_last = starts_BS[:, firsts, None], starts_BS[:, lasts, None]
    some = (firsts <= query_last) & (lasts > query_first - reach) & (lasts >= begins_first)
    every = query_whole & whole & (lasts <= query_first) & (firsts > query_last - reach)
    every = every & (firsts >= begins_last)
    return BlockMask.from_kv_blocks(
        *ordered_blocks(some & ~every),
        *ordered_blocks(every),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(seq_len, seq_len),
    )


def _same_document(starts_BS: Tensor) -> Any:
    """As `_block_mask`, where a query sees all of its document."""
    # Late: as in `_block_mask`.
    from torch.nn.attention.flex_attention import BlockMask

    seq_len = starts_BS.shape[1]

    def visible(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return starts_BS[batch, query] == starts_BS[batch, key]

    firsts, lasts = block_ends(seq_len, starts_BS.device)
    whole = lasts - firsts == FLEX_BLOCK - 1
    # Documents begin ever later, so those of a block's ends are the first and the last.
    begins_first, begins_last = starts_BS[:, firsts], starts_BS[:, lasts]
    some = (begins_first[:, :, None] <= begins_last[:, None]) & (
        begins_first[:, None] <= begins_last[:, :, None]
    )
    alone = (begins_first == begins_last) & whole
    every = alone[:, :, None] & alone[:, None] & some
    return BlockMask.from_kv_blocks(
        *ordered_blocks(some & ~every),
        *ordered_blocks(every),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(seq_len, seq_len),
    )
