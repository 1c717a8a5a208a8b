"""Transformer blocks: serial, and parallel as in GPT-J, PaLM and MegaScale.

Serial: x + attention(norm(x)), then the same with the MLP; two gathers and two
reductions over the tensor group. Parallel: x + attention(norm(x)) +
mlp(norm(x)); queries, keys, values and MLP inputs come from one matrix product,
and another one brings both branches back, so one gather and one reduction serve
both. With two norms the branches read different inputs, and each has its own
input projection and gather.

Source: MegaScale (NSDI '24), 3.1; PaLM (arXiv 2204.02311), 2.
"""

# S sequence, B micro-batch, D model width, G groups (key/value heads with their query
# heads), R rows of a group. Capitals are logical sizes; a rank's shard may be smaller.
from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import Tensor, nn

from trainer.model.attention import AttentionCore
from trainer.model.by_group import (
    ByGroup,
    attention_rows,
    mlp_rows,
    output_columns,
    ranks_of_group,
)
from trainer.model.config import GptConfig
from trainer.model.documents import Documents
from trainer.model.dropout import DropoutKey
from trainer.model.layers import Layer, MlpInput, MlpUp, Norm, QkvLinear, RowLinear
from trainer.model.moe import MoeMlp
from trainer.model.qk_norm import QkNorm
from trainer.model.recompute import recompute_all
from trainer.parallel.mesh import Mesh
from trainer.parallel.tensor import column_linear


def build_block(config: GptConfig, mesh: Mesh, layer: int) -> Block:
    """The block at `layer`, counted over the whole model."""
    kind = ParallelBlock if config.block == "parallel" else SerialBlock
    return kind(config, mesh, layer)


class Block(Layer, ABC):
    """A block of either kind, computed again in the backward pass if the config says so."""

    def __init__(self, config: GptConfig, mesh: Mesh, layer: int) -> None:
        super().__init__(config, mesh)
        self._layer = layer

    def forward(
        self, x_SBD: Tensor, key: DropoutKey | None, documents: Documents | None
    ) -> tuple[Tensor, ...]:
        """The residual stream after this block, and the terms of its router's losses if any.

        `key` None: nothing is dropped.
        """
        run = partial(self.run, key=key, documents=documents)
        mode = self.config.recompute_of(self._layer)
        if mode not in ("full", "offload"):
            return run(x_SBD)
        return recompute_all(run, x_SBD, offload=mode == "offload")

    @abstractmethod
    def run(
        self, x_SBD: Tensor, key: DropoutKey | None, documents: Documents | None
    ) -> tuple[Tensor, ...]:
        """As `forward`, keeping what the backward pass needs."""


class SerialBlock(Block):
    """Attention and MLP, each added to the residual stream, with norms before, after or of both."""

    def __init__(self, config: GptConfig, mesh: Mesh, layer: int) -> None:
        super().__init__(config, mesh, layer)
        before = config.norm_place in ("before", "both")
        self.attention_norm = Norm(config, mesh) if before else nn.Identity()
        self.attention = Attention(config, mesh, layer)
        self.mlp_norm = Norm(config, mesh) if before else nn.Identity()
        moe = config.moe_of(layer)
        self.mlp = Mlp(config, mesh, layer) if moe is None else MoeMlp(config, mesh, moe, layer)

    def run(
        self, x_SBD: Tensor, key: DropoutKey | None, documents: Documents | None
    ) -> tuple[Tensor, ...]:
        x_SBD = self.attention(self.attention_norm(x_SBD), x_SBD, key, documents)
        out: tuple[Tensor, ...] = self.mlp(self.mlp_norm(x_SBD), x_SBD, key)
        return out


class Attention(Layer):
    """Causal self-attention, added to the residual stream."""

    def __init__(self, config: GptConfig, mesh: Mesh, layer: int) -> None:
        super().__init__(config, mesh)
        self.qkv = QkvLinear(config, mesh)
        self.head_norm = None if config.qk_norm == "none" else QkNorm(config, mesh)
        self.out = RowLinear(
            config,
            mesh,
            features=config.query_width,
            bias=config.attention_bias,
            site=f"{layer}.attention",
        )
        self._core = AttentionCore(config=config, layer=layer, tp=mesh.tp, cp=mesh.cp)

    def forward(
        self,
        x_SBD: Tensor,
        residual_SBD: Tensor,
        key: DropoutKey | None,
        documents: Documents | None,
    ) -> Tensor:
        rows_SBGR = self.qkv(x_SBD).unflatten(-1, (self.num_groups, -1))
        mixed_SBGR = self._core(rows_SBGR, key, documents, self.head_norm)
        out: Tensor = self.out(mixed_SBGR.flatten(2), residual_SBD, key)
        return out


class Mlp(Layer):
    """Two linear layers around a non-linearity, added to the residual stream."""

    def __init__(self, config: GptConfig, mesh: Mesh, layer: int) -> None:
        super().__init__(config, mesh)
        self.up = MlpUp(config, mesh)
        self.down = RowLinear(
            config,
            mesh,
            features=config.mlp_hidden,
            bias=config.mlp_bias,
            site=f"{layer}.mlp",
        )

    def forward(self, x_SBD: Tensor, residual_SBD: Tensor, key: DropoutKey | None) -> tuple[Tensor]:
        return (self.down(self.up(x_SBD), residual_SBD, key),)


class ParallelBlock(Block):
    """Attention and MLP of the same input, added to the residual stream together.

    The columns of `output` go by group: outputs of its query heads, then its MLP
    units. What is dropped is the sum of both branches.
    """

    def __init__(self, config: GptConfig, mesh: Mesh, layer: int) -> None:
        super().__init__(config, mesh, layer)
        two = config.block_norms == 2
        self.input = TwoNormInput(config, mesh) if two else FusedInput(config, mesh)
        self.head_norm = None if config.qk_norm == "none" else QkNorm(config, mesh)
        self.output = RowLinear(
            config,
            mesh,
            features=config.query_width + config.mlp_hidden,
            bias=config.attention_bias or config.mlp_bias,
            two_biases=config.block_biases == 2,
            by_group=output_columns(config),
            site=f"{layer}.block",
        )
        self._core = AttentionCore(config=config, layer=layer, tp=mesh.tp, cp=mesh.cp)

    def run(
        self, x_SBD: Tensor, key: DropoutKey | None, documents: Documents | None
    ) -> tuple[Tensor, ...]:
        rows_SBGR, units_SBGR = self.input(x_SBD)
        mixed_SBGR = self._core(rows_SBGR, key, documents, self.head_norm)
        inner_SBGR = torch.cat((mixed_SBGR, units_SBGR), dim=-1)
        return (self.output(inner_SBGR.flatten(2), x_SBD, key),)


class FusedInput(MlpInput):
    """One norm and one projection for both branches.

    The rows of a group: its query heads, its key, its value, then its share of
    the MLP's rows (gate rows before the others). Biases are those of a branch.
    """

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self.norm = Norm(config, mesh)
        rows = attention_rows(config)
        self._weight = ByGroup(
            self,
            config,
            "weight",
            (*rows, *mlp_rows(config)),
            width=config.hidden,
            init="normal",
            std=config.init_std,
        )
        self._attention_bias = (
            ByGroup(self, config, "attention_bias", rows, width=None, init="zeros")
            if config.has_qkv_bias
            else None
        )
        shares = ranks_of_group(config, mesh.tp.size)
        self._num_rows = config.group_query_rows // shares + 2 * config.head_width

    def forward(self, x_SBD: Tensor) -> tuple[Tensor, Tensor]:
        """The core's rows and the MLP's units, both [S, B, G, R]."""
        projected = column_linear(self.norm(x_SBD), self._weight.tensor(), None, self.tp)
        groups_SBGR = torch.unflatten(projected, -1, (self.num_groups, -1))
        rows, mlp = groups_SBGR[..., : self._num_rows], groups_SBGR[..., self._num_rows :]
        if self._attention_bias is not None:
            rows = rows + self._attention_bias.tensor().view(self.num_groups, -1)
        return rows, self.activate(mlp)


class TwoNormInput(Layer):
    """A norm and a projection for each branch (GPT-NeoX)."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self.attention_norm = Norm(config, mesh)
        self.qkv = QkvLinear(config, mesh)
        self.mlp_norm = Norm(config, mesh)
        self.up = MlpUp(config, mesh)

    def forward(self, x_SBD: Tensor) -> tuple[Tensor, Tensor]:
        """The core's rows and the MLP's units, both [S, B, G, R]."""
        rows, units = self.qkv(self.attention_norm(x_SBD)), self.up(self.mlp_norm(x_SBD))
        groups = (self.num_groups, -1)
        return rows.unflatten(-1, groups), units.unflatten(-1, groups)
