"""The layers that blocks are made of: norms, split linear layers, tables.

What a layer computes over the group is in `trainer.parallel`; the elementwise
parts are in `trainer.model.fused`.
"""

# S sequence, B micro-batch, D model width, F features of a linear, V vocabulary.
# Capitals are logical sizes; a rank's shard may be smaller.
from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.by_group import ByGroup, Rows, attention_rows
from trainer.model.config import GptConfig
from trainer.model.documents import Documents
from trainer.model.dropout import DropoutKey, stream_mask
from trainer.model.fused import (
    bias_activation,
    bias_dropout_add,
    bias_gated,
    layer_norm,
    rms_norm,
)
from trainer.model.parameters import ParallelModule
from trainer.model.parts import is_in_ring, places_of
from trainer.parallel.mesh import Mesh
from trainer.parallel.tensor import TensorParallel, column_linear, row_linear


def tensor_parallel(config: GptConfig, mesh: Mesh) -> TensorParallel:
    """How the layers of a model are split over the mesh's tensor group."""
    # A group of one has no sequence to split.
    split = config.sequence_parallel and mesh.tp.size > 1
    return TensorParallel(
        comm=mesh.tp,
        sequence_parallel=split,
        chunks=config.tp_chunks,
        min_piece_bytes=config.tp_min_piece_bytes,
        weight_gradients=mesh.weight_gradients,
    )


class Layer(ParallelModule):
    """A module of the GPT: knows the config, its tensor group, who divides sequences with it,
    and its device."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(mesh.tp, dtype=config.dtype, device=mesh.device)
        self.config = config
        self.tp = tensor_parallel(config, mesh)
        self.cp = mesh.cp
        self.device = mesh.device
        self.num_groups = max(1, config.groups // mesh.tp.size)


class Norm(Layer):
    """LayerNorm or RMSNorm over the model width, replicated over the tensor group."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        shape, weighted = (config.hidden,), config.norm_weight != "none"
        biased = weighted and config.norm == "layernorm" and config.norm_bias
        self.weight = declare_norm_weight(self, "weight", config.hidden) if weighted else None
        self.bias = self.declare("bias", shape, init="zeros") if biased else None

    def forward(self, x_SBD: Tensor) -> Tensor:
        weight = None if self.weight is None else norm_factor(self.config, self.weight)
        if self.config.norm == "rmsnorm":
            return rms_norm(x_SBD, weight, self.config.norm_eps)
        return layer_norm(x_SBD, weight, self.bias, self.config.norm_eps)


def declare_norm_weight(
    layer: Layer, name: str, width: int, *, shard_dim: int | None = None
) -> nn.Parameter:
    """A weight of a norm, which multiplies with one at first."""
    init: Literal["zeros", "ones"] = "ones"
    if layer.config.norm_weight == "one_plus":
        init = "zeros"
    return layer.declare(name, (width,), init=init, shard_dim=shard_dim)


def norm_factor(config: GptConfig, weight: Tensor) -> Tensor:
    """What a norm with this weight multiplies with."""
    return 1.0 + weight if config.norm_weight == "one_plus" else weight


class QkvLinear(Layer):
    """Queries, key and value of each group of heads."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        rows = attention_rows(config)
        self._weight = ByGroup(
            self, config, "weight", rows, width=config.hidden, init="normal", std=config.init_std
        )
        self._bias = (
            ByGroup(self, config, "bias", rows, width=None, init="zeros")
            if config.has_qkv_bias
            else None
        )

    def forward(self, x_SBD: Tensor) -> Tensor:
        bias = None if self._bias is None else self._bias.tensor()
        return column_linear(x_SBD, self._weight.tensor(), bias, self.tp)


class IntoStream(Layer):
    """What a branch ends with: what goes into the residual stream, and how.

    `site` names it among the layer's places where something is dropped.
    """

    def __init__(
        self, config: GptConfig, mesh: Mesh, *, site: str, bias: bool, two_biases: bool = False
    ) -> None:
        super().__init__(config, mesh)
        self.bias, self.attention_bias = (
            self.declare(name, (config.hidden,), init="zeros") if wanted else None
            for name, wanted in (("bias", bias), ("attention_bias", two_biases))
        )
        # A parallel block has none: its branches are one product.
        self.norm = None if config.norm_place == "before" else Norm(config, mesh)
        self._site = site

    def added(self, product_SBD: Tensor, residual_SBD: Tensor, key: DropoutKey | None) -> Tensor:
        """The stream plus the product and its bias, some of it dropped by `key`."""
        bias: Tensor | None = self.bias
        if self.bias is not None and self.attention_bias is not None:
            bias = self.bias + self.attention_bias
        summed = self.config.norm_place == "sum"
        if self.norm is not None and not summed:
            product_SBD = self.norm(product_SBD if bias is None else product_SBD + bias)
            bias = None
        scale = self.config.residual_scale
        if scale != 1.0:
            product_SBD, bias = product_SBD * scale, None if bias is None else bias * scale
        keep = stream_mask(product_SBD, self._site, self.config.dropout, self.tp, key)
        out_SBD = bias_dropout_add(product_SBD, bias, residual_SBD, keep)
        return self.norm(out_SBD) if self.norm is not None and summed else out_SBD


class RowLinear(IntoStream):
    """A linear layer back into the residual stream; its input features are split over the group.

    `two_biases`: that of attention by itself, beside that of the MLP. `by_group`: whose columns
    go by group.
    """

    def __init__(
        self,
        config: GptConfig,
        mesh: Mesh,
        *,
        features: int,
        bias: bool,
        site: str,
        two_biases: bool = False,
        by_group: Sequence[Rows] | None = None,
    ) -> None:
        super().__init__(config, mesh, site=site, bias=bias, two_biases=two_biases)
        self._weight: ByGroup | None = None
        if by_group is None:
            shape = (config.hidden, features)
            self.weight = self.declare(
                "weight", shape, init="normal", std=config.residual_std, shard_dim=1
            )
        else:
            self._weight = ByGroup(
                self,
                config,
                "weight",
                by_group,
                width=config.hidden,
                init="normal",
                std=config.residual_std,
                columns=True,
            )

    def forward(self, x_SBF: Tensor, residual_SBD: Tensor, key: DropoutKey | None) -> Tensor:
        """The stream plus the product and its bias, some of it dropped by `key`."""
        weight = self.weight if self._weight is None else self._weight.tensor()
        return self.added(row_linear(x_SBF, weight, None, self.tp), residual_SBD, key)


class MlpInput(Layer):
    """The MLP up to its activation: biases and the non-linearity; subclasses project."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self.bias, self.gate_bias = (
            self.declare(name, (config.mlp_hidden,), init="zeros", shard_dim=0) if wanted else None
            for name, wanted in (
                ("bias", config.mlp_bias),
                ("gate_bias", config.mlp_bias and config.gate is not None),
            )
        )

    def activate(self, projected: Tensor) -> Tensor:
        """[S, B, ..., features] to as many hidden units; a gate's features come first."""
        shape = (*projected.shape[2:-1], -1)
        bias, gate_bias = (
            None if bias is None else bias.view(shape) for bias in (self.bias, self.gate_bias)
        )
        match self.config.activation:
            case "swiglu" | "geglu" | "geglu_tanh" as kind:
                gate, x = projected.chunk(2, dim=-1)
                return bias_gated(gate, x, gate_bias, bias, kind)
            case kind:
                return bias_activation(projected, bias, kind)


class MlpUp(MlpInput):
    """The MLP's input projection by itself. A gate's rows are a plane of their own."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        shape: tuple[int, ...] = (config.mlp_hidden, config.hidden)
        if config.mlp_inputs > 1:
            shape = (config.mlp_inputs, *shape)
        self.weight = self.declare(
            "weight", shape, init="normal", std=config.init_std, shard_dim=len(shape) - 2
        )

    def forward(self, x_SBD: Tensor) -> Tensor:
        weight_FD = self.weight.view(-1, self.config.hidden)
        return self.activate(column_linear(x_SBD, weight_FD, None, self.tp))


class TokenTable(Layer):
    """One row per token id, split over the tensor group by id."""

    def __init__(
        self,
        config: GptConfig,
        mesh: Mesh,
        *,
        tied: bool = False,
        counted: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__(config, mesh)
        self.weight = self.declare(
            "weight",
            (config.table_rows, config.hidden),
            init="normal",
            std=config.init_std,
            shard_dim=0,
            tied=tied,
            counted=counted,
        )
        self.bias = (
            self.declare("bias", (config.table_rows,), init="zeros", shard_dim=0) if bias else None
        )


class PositionTable(Layer):
    """One learned row per position."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        shape = (config.seq_len, config.hidden)
        self.weight = self.declare("weight", shape, init="normal", std=config.init_std)

    def forward(self, num_positions: int, documents: Documents | None) -> Tensor:
        """Of so many tokens of this rank's, with or without a dim of the micro-batch."""
        own = _own_part(self, num_positions)
        if documents is not None and documents.positions_SB is not None:
            return F.embedding(documents.positions_SB[own], self.weight)
        return self.weight[own].unsqueeze(1)


class SegmentTable(Layer):
    """One learned row per segment."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        shape = (config.segments, config.hidden)
        self.weight = self.declare("weight", shape, init="normal", std=config.init_std)

    def forward(self, segments_SB: Tensor | None, num_positions: int) -> Tensor:
        """Of so many tokens of this rank's; without segments every token is of the first, [D]."""
        if segments_SB is None:
            return self.weight[0]
        return F.embedding(segments_SB[_own_part(self, num_positions)], self.weight)


def _own_part(layer: Layer, num_positions: int) -> slice | Tensor:
    """Which positions a rank has, that has so many."""
    of_tp = layer.comm.index if layer.tp.sequence_parallel else 0
    if is_in_ring(layer.config, layer.cp):
        places_L = places_of(layer.config, layer.cp, layer.device)
        return places_L[of_tp * num_positions :][:num_positions]
    parts = layer.comm.size if layer.tp.sequence_parallel else 1
    first = (layer.cp.index * parts + of_tp) * num_positions
    return slice(first, first + num_positions)
