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

from trainer.model.by_group import ranks_of_group
from trainer.model.config import GptConfig
from trainer.model.documents import Documents
from trainer.model.dropout import DropoutKey, keep_mask
from trainer.model.fused import causal_softmax, masked_softmax
from trainer.model.qk_norm import QkNorm, normed
from trainer.model.recompute import recompute
from trainer.model.rope import rotate
from trainer.model.window import flex_attention, masked_flex_attention, windowed_attention
from trainer.parallel.comm import Comm


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCore:
    """Causal attention of one layer over this rank's heads."""

    config: GptConfig
    layer: int
    tp: Comm

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
        rope = config.rope_of(self.layer)
        if rope is not None:
            places_SB = None if documents is None else documents.positions_SB
            q_SBHC, k_SBGC = (rotate(each, rope, places_SB) for each in (q_SBHC, k_SBGC))
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q_SBHC, k_SBGC, v_SBGC))
        mixed_BHSC = self._attend(q, k, v, key, documents)
        return mixed_BHSC.permute(2, 0, 1, 3).reshape(*rows_SBGR.shape[:3], -1)

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
        dropped, softcap = key is not None and rate > 0, self.config.attention_softcap
        if dropped or softcap is not None:
            generator = None
            if key is not None and dropped:
                # SDPA draws from the global generator: masks would depend on what ran before.
                generator = key.generator(f"{self.layer}.weights", self.tp.index, q_BHSC.device)
            core = partial(
                weighted_attention, rate=rate, generator=generator, scale=scale, softcap=softcap
            )
            if documents is not None:
                return core(q_BHSC, k_BGSC, v_BGSC, documents.mask(window))
            if window is not None:
                return windowed_attention(q_BHSC, k_BGSC, v_BGSC, window, core)
            return core(q_BHSC, k_BGSC, v_BGSC, None)
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
                is_causal=True,
                enable_gqa=_shares(q_BHSC, k_BGSC),
                scale=scale,
            )
        if q_BHSC.is_cuda:
            return flex_attention(q_BHSC, k_BGSC, v_BGSC, window, scale=scale)
        core = partial(masked_sdpa, scale=scale)
        return windowed_attention(q_BHSC, k_BGSC, v_BGSC, window, core)


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
    """Attention with the keys that a mask allows."""
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
