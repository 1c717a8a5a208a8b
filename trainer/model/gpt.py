"""A GPT, cut into pipeline chunks and tensor-parallel shards.

Pre-LayerNorm blocks, causal attention, GELU (tanh), learned positions, tied or
untied embeddings. A chunk holds consecutive blocks; the first also embeds, the
last also projects and computes the loss. The residual stream is [S, B, D], so
that sequence parallelism splits it along its first dimension.

With tied embeddings and more than one chunk, the last one holds a copy of
the embedding; the sum of both gradients keeps the copies equal.
"""

# S sequence, B micro-batch, D model width, V vocabulary, H heads, C head width.
# Capitals are logical sizes; a rank's shard may be smaller.
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.core.partition import ModelPart
from trainer.model.parameters import ParallelModule
from trainer.parallel.mesh import Mesh
from trainer.parallel.tensor import (
    TensorParallel,
    column_linear,
    row_linear,
    vocab_cross_entropy,
    vocab_embedding,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """The shape of the model and how it is computed."""

    layers: int
    hidden: int
    heads: int
    mlp_hidden: int
    vocab_size: int
    seq_len: int
    tied_embeddings: bool
    norm_eps: float
    init_std: float
    sequence_parallel: bool
    dtype: torch.dtype

    @property
    def residual_std(self) -> float:
        """Projections into the residual stream start smaller: 2 per layer add up (GPT-2)."""
        return self.init_std / math.sqrt(2 * self.layers)


def tensor_parallel(config: GptConfig, mesh: Mesh) -> TensorParallel:
    """How the layers of a model are split over the mesh's tensor group."""
    # A group of one has no sequence to split.
    split = config.sequence_parallel and mesh.tp.size > 1
    return TensorParallel(comm=mesh.tp, sequence_parallel=split)


class _Part(ParallelModule):
    """A module of the GPT: knows the config, its tensor group and its device."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(mesh.tp, dtype=config.dtype, device=mesh.device)
        self.config = config
        self.tp = tensor_parallel(config, mesh)


class Norm(_Part):
    """LayerNorm over the model width, replicated over the tensor group."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self.weight = self.declare("weight", (config.hidden,), init="ones")
        self.bias = self.declare("bias", (config.hidden,), init="zeros")

    def forward(self, x_SBD: Tensor) -> Tensor:
        return F.layer_norm(x_SBD, self.weight.shape, self.weight, self.bias, self.config.norm_eps)


class ColumnLinear(_Part):
    """A linear layer whose output features are split over the tensor group."""

    def __init__(self, config: GptConfig, mesh: Mesh, *, features: int) -> None:
        super().__init__(config, mesh)
        shape = (features, config.hidden)
        self.weight = self.declare("weight", shape, init="normal", std=config.init_std, shard_dim=0)
        self.bias = self.declare("bias", (features,), init="zeros", shard_dim=0)

    def forward(self, x_SBD: Tensor) -> Tensor:
        return column_linear(x_SBD, self.weight, self.bias, self.tp)


class RowLinear(_Part):
    """A linear layer whose input features are split over the tensor group."""

    def __init__(self, config: GptConfig, mesh: Mesh, *, features: int) -> None:
        super().__init__(config, mesh)
        shape = (config.hidden, features)
        self.weight = self.declare(
            "weight", shape, init="normal", std=config.residual_std, shard_dim=1
        )
        self.bias = self.declare("bias", (config.hidden,), init="zeros")

    def forward(self, x_SBF: Tensor) -> Tensor:
        return row_linear(x_SBF, self.weight, self.bias, self.tp)


class Attention(_Part):
    """Causal self-attention over this rank's heads."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        # Rows run head by head, each head's q, k and v together, so that a
        # contiguous shard holds whole heads.
        self.qkv = ColumnLinear(config, mesh, features=3 * config.hidden)
        self.out = RowLinear(config, mesh, features=config.hidden)
        self._head_width = config.hidden // config.heads

    def forward(self, x_SBD: Tensor) -> Tensor:
        qkv = self.qkv(x_SBD)
        seq_len, batch = qkv.shape[:2]
        qkv_SBH3C = qkv.view(seq_len, batch, -1, 3, self._head_width)
        q_BHSC, k_BHSC, v_BHSC = qkv_SBH3C.permute(3, 1, 2, 0, 4).unbind(0)
        mixed_BHSC = F.scaled_dot_product_attention(q_BHSC, k_BHSC, v_BHSC, is_causal=True)
        mixed_SBD = mixed_BHSC.permute(2, 0, 1, 3).reshape(seq_len, batch, -1)
        out: Tensor = self.out(mixed_SBD)
        return out


class Mlp(_Part):
    """Two linear layers around a GELU."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self.up = ColumnLinear(config, mesh, features=config.mlp_hidden)
        self.down = RowLinear(config, mesh, features=config.mlp_hidden)

    def forward(self, x_SBD: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x_SBD), approximate="tanh"))
        return out


class Block(_Part):
    """Attention and MLP, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self.attention_norm = Norm(config, mesh)
        self.attention = Attention(config, mesh)
        self.mlp_norm = Norm(config, mesh)
        self.mlp = Mlp(config, mesh)

    def forward(self, x_SBD: Tensor) -> Tensor:
        x_SBD = x_SBD + self.attention(self.attention_norm(x_SBD))
        out_SBD: Tensor = x_SBD + self.mlp(self.mlp_norm(x_SBD))
        return out_SBD


class TokenTable(_Part):
    """One row per token id, split over the tensor group by id."""

    def __init__(
        self, config: GptConfig, mesh: Mesh, *, tied: bool = False, counted: bool = True
    ) -> None:
        super().__init__(config, mesh)
        self.weight = self.declare(
            "weight",
            (config.vocab_size, config.hidden),
            init="normal",
            std=config.init_std,
            shard_dim=0,
            tied=tied,
            counted=counted,
        )


class PositionTable(_Part):
    """One learned row per position."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        shape = (config.seq_len, config.hidden)
        self.weight = self.declare("weight", shape, init="normal", std=config.init_std)

    def forward(self, num_positions: int) -> Tensor:
        first = self.comm.index * num_positions if self.tp.sequence_parallel else 0
        return self.weight[first : first + num_positions].unsqueeze(1)


class GptChunk(nn.Module):
    """Consecutive layers of the model: what one pipeline stage holds of one virtual stage.

    Module names count layers over the whole model, so a parameter has the same
    name on every layout.
    """

    def __init__(self, config: GptConfig, mesh: Mesh, part: ModelPart) -> None:
        super().__init__()
        self.part = part
        self._tp = tensor_parallel(config, mesh)
        # One rank may hold both ends of a pipeline in chunks of their own.
        tied = config.tied_embeddings and not (part.is_first and part.is_last)
        if part.is_first or (part.is_last and config.tied_embeddings):
            self.tokens = TokenTable(config, mesh, tied=tied, counted=part.is_first)
        if part.is_first:
            self.positions = PositionTable(config, mesh)
        self.blocks = nn.ModuleDict({str(layer): Block(config, mesh) for layer in part.layers})
        if part.is_last:
            self.norm = Norm(config, mesh)
            self.head = None if config.tied_embeddings else TokenTable(config, mesh)

    def begin(self, step: int, micro_batch: int) -> None:
        """What the next forward computes; nothing in this model depends on it."""

    def forward(self, tokens_SB: Tensor, hidden: Tensor | None, targets_SB: Tensor) -> Tensor:
        """The hidden state for the next chunk, or the summed loss on the last one."""
        if hidden is None:
            x_SBD = vocab_embedding(tokens_SB, self.tokens.weight, self._tp)
            x_SBD = x_SBD + self.positions(x_SBD.shape[0])
        else:
            x_SBD = hidden
        for block in self.blocks.values():
            x_SBD = block(x_SBD)
        return self._loss(x_SBD, targets_SB) if self.part.is_last else x_SBD

    def _loss(self, x_SBD: Tensor, targets_SB: Tensor) -> Tensor:
        table = self.tokens if self.head is None else self.head
        logits_SBV = column_linear(self.norm(x_SBD), table.weight, None, self._tp)
        if logits_SBV.element_size() < 4:
            # Sums over the vocabulary, and over all tokens, need more than 8 or 11 bits.
            logits_SBV = logits_SBV.float()
        losses_N = vocab_cross_entropy(
            logits_SBV.flatten(0, 1), targets_SB.flatten(), self._tp.comm
        )
        return losses_N.sum()
