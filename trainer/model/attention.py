"""The attention core: from projected rows to each head's mixture of values.

It has no parameters of its own, so it may be computed again instead of kept. Which kernel
runs follows from the layer: SDPA for full attention, blocks of it (FlexAttention
on CUDA) inside a window, and explicit weights where they are dropped.
"""

# S sequence, B micro-batch, H query heads, G key/value heads (groups), C head width,
# R rows of a group, K keys. Sizes are a rank's own.
from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.alibi import distance_score, head_slopes, position_bias
from trainer.model.by_group import ranks_of_group
from trainer.model.config import GptConfig
from trainer.model.documents import Documents
from trainer.model.dropout import DropoutKey, keep_mask
from trainer.model.fused import causal_softmax, masked_softmax
from trainer.model.parts import is_in_ring, pieces_of, places_of
from trainer.model.qk_norm import QkNorm, normed
from trainer.model.recompute import recompute
from trainer.model.rope import rotate
from trainer.model.window import (
    Core,
    flex_attention,
    masked_flex_attention,
    window_block_mask,
    windowed_attention,
)
from trainer.parallel.comm import Comm
from trainer.parallel.context import heads_apart, heads_together
from trainer.parallel.ring import Seen, ring_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCore:
    """Attention of one layer over this rank's heads.

    Ranks of `cp` have a part of the sequence each, and divide the heads of a tensor rank while
    attention is computed.
    """

    config: GptConfig
    layer: int
    tp: Comm
    cp: Comm

    def __call__(
        self,
        rows_SBGR: Tensor,
        key: DropoutKey | None,
        documents: Documents | None,
        norm: QkNorm | None,
    ) -> Tensor:
        """Each group's query, key and value rows to its query heads' outputs."""
        factors = () if norm is None else norm.factors()
        if self.config.recompute_of(self.layer) == "selective":
            mix = partial(self._mix, key=key, documents=documents)
            return recompute(mix, rows_SBGR, *factors)
        return self._mix(rows_SBGR, *factors, key=key, documents=documents)

    def _mix(
        self,
        rows_SBGR: Tensor,
        *factors: Tensor,
        key: DropoutKey | None,
        documents: Documents | None,
    ) -> Tensor:
        config = self.config
        width = config.head_width
        queries = config.group_query_rows // ranks_of_group(config, self.tp.size)
        q, k_SBGC, v_SBGC = torch.split(rows_SBGR, [queries, width, width], dim=-1)
        q_SBHC = torch.unflatten(q, -1, (-1, width)).flatten(2, 3)
        if factors:
            q_SBHC, k_SBGC = normed(q_SBHC, k_SBGC, factors, config, self.tp)
        in_ring = is_in_ring(config, self.cp)
        swaps = self.cp.size > 1 and not in_ring
        if swaps:
            q_SBHC, k_SBGC, v_SBGC = heads_apart(q_SBHC, k_SBGC, v_SBGC, self.cp)
        rope = config.rope_of(self.layer)
        if rope is not None:
            places_SB = None if documents is None else documents.positions_SB
            if in_ring:
                own_L = places_of(config, self.cp, q_SBHC.device)
                places_SB = own_L[:, None] if places_SB is None else places_SB[own_L]
            q_SBHC, k_SBGC = (
                rotate(each, rope, places_SB, config.seq_len if in_ring else None)
                for each in (q_SBHC, k_SBGC)
            )
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q_SBHC, k_SBGC, v_SBGC))
        apart = documents if documents is not None and documents.are_apart else None
        if in_ring:
            mixed_BHSC = ring_attention(q, k, v, self.cp, self._seen(apart), config.attention_scale)
        else:
            mixed_BHSC = self._attend(q, k, v, key, apart)
        mixed_SBHC = mixed_BHSC.permute(2, 0, 1, 3)
        if swaps:
            mixed_SBHC = heads_together(mixed_SBHC, self.cp)
        return mixed_SBHC.reshape(*rows_SBGR.shape[:3], -1)

    def _seen(self, documents: Documents | None) -> Seen:
        """Which keys a query of any part of the sequence sees."""
        config = self.config
        return Seen(
            pieces=pieces_of(config, self.cp),
            bidirectional=config.bidirectional,
            window=config.window_of(self.layer),
            starts_BS=None if documents is None else documents.starts_BS,
        )

    def _attend(
        self,
        q_BHSC: Tensor,
        k_BGSC: Tensor,
        v_BGSC: Tensor,
        key: DropoutKey | None,
        documents: Documents | None,
    ) -> Tensor:
        rate, scale = self.config.attention_dropout, self.config.attention_scale
        window = self.config.window_of(self.layer)
        softcap = self.config.attention_softcap
        generator = self._generator(key, q_BHSC.device)
        if self.config.alibi:
            return self._attend_by_distance(q_BHSC, k_BGSC, v_BGSC, generator, documents)
        if generator is not None or softcap is not None:
            core = partial(
                weighted_attention, rate=rate, generator=generator, scale=scale, softcap=softcap
            )
            if documents is not None:
                return core(q_BHSC, k_BGSC, v_BGSC, documents.mask(window))
            if window is not None:
                return windowed_attention(q_BHSC, k_BGSC, v_BGSC, window, core)
            return core(q_BHSC, k_BGSC, v_BGSC, self._everything(q_BHSC))
        if documents is not None:
            if q_BHSC.is_cuda:
                mask = documents.block_mask(window)
                return masked_flex_attention(q_BHSC, k_BGSC, v_BGSC, mask, scale=scale)
            return masked_sdpa(q_BHSC, k_BGSC, v_BGSC, documents.mask(window), scale=scale)
        if window is None:
            return F.scaled_dot_product_attention(
                q_BHSC,
                k_BGSC,
                v_BGSC,
                is_causal=not self.config.bidirectional,
                enable_gqa=_shares(q_BHSC, k_BGSC),
                scale=scale,
            )
        if q_BHSC.is_cuda:
            return flex_attention(q_BHSC, k_BGSC, v_BGSC, window, scale=scale)
        core = partial(masked_sdpa, scale=scale)
        return windowed_attention(q_BHSC, k_BGSC, v_BGSC, window, core)

    def _everything(self, q_BHSC: Tensor) -> Tensor | None:
        """A mask that hides nothing; None where attention is causal."""
        if not self.config.bidirectional:
            return None
        seq_len = q_BHSC.shape[2]
        return torch.ones(seq_len, seq_len, dtype=torch.bool, device=q_BHSC.device)

    def _generator(self, key: DropoutKey | None, device: torch.device) -> torch.Generator | None:
        """What says which weights are dropped; None: none are."""
        if key is None or self.config.attention_dropout == 0:
            return None
        # SDPA draws from the global generator: masks would depend on what ran before.
        return key.generator(f"{self.layer}.weights", self.tp.index, device)

    def _attend_by_distance(
        self,
        q_BHSC: Tensor,
        k_BGSC: Tensor,
        v_BGSC: Tensor,
        generator: torch.Generator | None,
        documents: Documents | None,
    ) -> Tensor:
        """With ALiBi: what a query may see, and how much less of what is far, in one tensor."""
        config, window = self.config, self.config.window_of(self.layer)
        heads, seq_len = q_BHSC.shape[1:3]
        place = self.tp.index * self.cp.size + self.cp.index
        slopes = head_slopes(config.heads)[place * heads :][:heads]
        if generator is None and q_BHSC.is_cuda:
            if documents is None:
                mask = window_block_mask(seq_len, window or seq_len, q_BHSC.device)
            else:
                mask = documents.block_mask(window)
            score = distance_score(slopes, q_BHSC.device)
            scale = config.attention_scale
            return masked_flex_attention(q_BHSC, k_BGSC, v_BGSC, mask, scale=scale, score_mod=score)
        core = partial(
            biased_attention,
            rate=config.attention_dropout,
            generator=generator,
            scale=config.attention_scale,
        )
        if documents is not None:
            return core(q_BHSC, k_BGSC, v_BGSC, documents.bias(window, slopes, q_BHSC))
        return distance_attention(q_BHSC, k_BGSC, v_BGSC, slopes, window, core)


def distance_attention(
    q_BHSC: Tensor,
    k_BGSC: Tensor,
    v_BGSC: Tensor,
    slopes: tuple[float, ...],
    window: int | None,
    core: Core,
) -> Tensor:
    """ALiBi over one document, by a core that adds a tensor to the scores."""
    # Without a window in one as long as the sequence, whose blocks leave out most of what is
    # behind a query: a tensor for all of it took about 1.4 times as long.
    reach = window or q_BHSC.shape[2]

    def biased(q_BHQC: Tensor, k_BGKC: Tensor, v_BGKC: Tensor, _allowed: object) -> Tensor:
        bias = position_bias(slopes, q_BHQC.shape[2], k_BGKC.shape[2], reach, q_BHQC)
        return core(q_BHQC, k_BGKC, v_BGKC, bias)

    return windowed_attention(q_BHSC, k_BGSC, v_BGSC, reach, biased)


def biased_attention(
    q_BHSC: Tensor,
    k_BGKC: Tensor,
    v_BGKC: Tensor,
    bias_BHSK: Tensor,
    *,
    rate: float,
    generator: torch.Generator | None,
    scale: float | None,
) -> Tensor:
    """Attention with something added to each score; `generator` None: nothing is dropped."""
    if generator is None:
        return masked_sdpa(q_BHSC, k_BGKC, v_BGKC, bias_BHSK, scale=scale)
    groups = (k_BGKC.shape[1], -1)
    q, bias = (torch.unflatten(each, 1, groups) for each in (q_BHSC, bias_BHSK))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * (q @ k_BGKC.unsqueeze(2).transpose(-1, -2))
    weights = torch.softmax(scores + bias, dim=-1)
    weights = weights * keep_mask(weights, rate, generator)
    return (weights @ v_BGKC.unsqueeze(2)).flatten(1, 2)


def weighted_attention(
    q_BHSC: Tensor,
    k_BGKC: Tensor,
    v_BGKC: Tensor,
    allowed_SK: Tensor | None,
    *,
    rate: float,
    generator: torch.Generator | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention with its weights spelled out, and dropped with probability `rate`.

    `generator` None: nothing is dropped. `softcap` bounds the scores.
    `allowed_SK` None: each query sees the keys up to its own. It may have dims of the batch and
    of heads in front.
    """
    q = torch.unflatten(q_BHSC, 1, (k_BGKC.shape[1], -1))
    scores = q @ k_BGKC.unsqueeze(2).transpose(-1, -2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if softcap is not None:
        scores, scale = softcap * torch.tanh(scores * (scale / softcap)), 1.0
    if allowed_SK is None:
        weights = causal_softmax(scores, scale)
    else:
        allowed = allowed_SK if allowed_SK.dim() == 2 else allowed_SK.unsqueeze(2)
        weights = masked_softmax(scores, allowed, scale)
    if generator is not None:
        weights = weights * keep_mask(weights, rate, generator)
    return (weights @ v_BGKC.unsqueeze(2)).flatten(1, 2)


def masked_sdpa(
    q_BHSC: Tensor,
    k_BGKC: Tensor,
    v_BGKC: Tensor,
    allowed_SK: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention with the keys that a mask allows, or with what a mask of numbers adds to scores."""
    return F.scaled_dot_product_attention(
        q_BHSC,
        k_BGKC,
        v_BGKC,
        attn_mask=allowed_SK,
        enable_gqa=_shares(q_BHSC, k_BGKC),
        scale=scale,
    )


def _shares(q_BHSC: Tensor, k_BGSC: Tensor) -> bool:
    return q_BHSC.shape[1] != k_BGSC.shape[1]
