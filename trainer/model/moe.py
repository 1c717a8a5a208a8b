"""Mixture of experts in place of a block's MLP: a router, its experts, and maybe a shared one.

Every expert is split over the tensor group as an MLP is: each rank has some of each expert's
width, so that all ranks have the same work however tokens are distributed. The router sees what
a rank has of the sequence; its choices and weights are gathered with the tokens. Replicas may
divide experts among them (`trainer.parallel.experts`): rows then go there and back.

Source: Mixtral (arXiv 2401.04088), DeepSeekMoE (2401.06066) for shared experts. That tokens are
sorted and none is dropped is as in MegaBlocks (2211.15841).
"""

# S sequence, B micro-batch, D model width, K choices of a token, N = S*B tokens, T = N K slots,
# E experts, F width of an expert.
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.config import GptConfig, MoeConfig
from trainer.model.dropout import DropoutKey
from trainer.model.fused import bias_activation, bias_gated
from trainer.model.grouped import Slots, gathered, grouped_linear, spread, unsorted
from trainer.model.layers import IntoStream, Layer
from trainer.model.router import Router, layer_terms, over_parts
from trainer.parallel.experts import Exchange
from trainer.parallel.mesh import Mesh
from trainer.parallel.tensor import own_sequence, whole_sequence


class MoeMlp(IntoStream):
    """The experts of one layer, added to the residual stream."""

    def __init__(self, config: GptConfig, mesh: Mesh, moe: MoeConfig, layer: int) -> None:
        super().__init__(config, mesh, site=f"{layer}.mlp", bias=False)
        self._moe = moe
        self.router = Router(config, mesh, moe)
        self.experts = Experts(config, mesh, moe)
        self._ep = mesh.ep
        self.shared = SharedExpert(config, mesh, moe) if moe.shared_hidden else None

    def forward(
        self, x_SBD: Tensor, residual_SBD: Tensor, key: DropoutKey | None
    ) -> tuple[Tensor, ...]:
        """The stream after this layer, and the terms of the router's losses if it has any."""
        routing = self.router(x_SBD)
        weights = [routing.weights_SBK]
        if self.shared is not None:
            weights += self.shared.gate_of(x_SBD)
        chosen_SBK = routing.chosen_SBK
        if self.tp.sequence_parallel:
            chosen_SBK = self.comm.all_gather(chosen_SBK)
        slots = Slots.of(chosen_SBK.flatten(0, 1), self._moe.num_experts)
        full_SBD = whole_sequence(x_SBD, self.tp)
        x_ND = full_SBD.flatten(0, 1)
        weights_NK = whole_sequence(torch.cat(weights, dim=-1), self.tp).flatten(0, 1)
        routed_NK = weights_NK[:, : self._moe.per_token]
        out_ND = gathered(self._mixed(spread(x_ND, slots), slots), routed_NK, slots)
        if self.shared is not None:
            shared_ND = self.shared(x_ND)
            if self._moe.shared_gate:
                shared_ND = shared_ND * weights_NK[:, -1:].to(shared_ND.dtype)
            out_ND = out_ND + shared_ND
        product_SBD = own_sequence(out_ND.view(full_SBD.shape), self.tp)
        out = self.added(product_SBD, residual_SBD, key)
        if self._moe.num_terms == 0:
            return (out,)
        return out, layer_terms(self._moe, routing, over_parts(slots.counts_E, self.cp))

    def _mixed(self, rows_TD: Tensor, slots: Slots) -> Tensor:
        """What the experts of rows make of them, wherever these experts are."""
        if self._ep.size == 1:
            out: Tensor = self.experts(rows_TD, slots)
            return out
        exchange = Exchange.of(slots.counts_E, self._ep)
        own = Slots.of(exchange.experts_T.unsqueeze(1), self._moe.num_experts // self._ep.size)
        made_TD = self.experts(spread(exchange.there(rows_TD), own), own)
        return exchange.back(unsorted(made_TD, own))


class Experts(Layer):
    """The matrices of experts, one after another; a gate's rows come before the others.

    All experts of a layer, or this rank's of those that replicas divide among them.
    """

    def __init__(self, config: GptConfig, mesh: Mesh, moe: MoeConfig) -> None:
        super().__init__(config, mesh)
        inputs = (config.mlp_inputs, moe.hidden, config.hidden)
        self.up = self.declare(
            "up",
            (moe.num_experts, *inputs),
            init="normal",
            std=config.init_std,
            shard_dim=2,
            stacked=True,
            divided=mesh.ep,
        )
        self.down = self.declare(
            "down",
            (moe.num_experts, config.hidden, moe.hidden),
            init="normal",
            std=config.residual_std,
            shard_dim=2,
            stacked=True,
            divided=mesh.ep,
        )

    def forward(self, x_TD: Tensor, slots: Slots) -> Tensor:
        """What each slot's expert makes of its token, [T, D]; this rank's part of a sum."""
        gradients = self.tp.weight_gradients
        inputs_TF = grouped_linear(x_TD, self.up.flatten(1, 2), slots, gradients)
        return grouped_linear(activated(self.config, inputs_TF), self.down, slots, gradients)


class SharedExpert(Layer):
    """The expert that all tokens go through, with a gate for each token if the model has one."""

    def __init__(self, config: GptConfig, mesh: Mesh, moe: MoeConfig) -> None:
        super().__init__(config, mesh)
        self.up = self.declare(
            "up",
            (config.mlp_inputs, moe.shared_hidden, config.hidden),
            init="normal",
            std=config.init_std,
            shard_dim=1,
        )
        self.down = self.declare(
            "down",
            (config.hidden, moe.shared_hidden),
            init="normal",
            std=config.residual_std,
            shard_dim=1,
        )
        self.gate = (
            self.declare("gate", (1, config.hidden), init="normal", std=config.init_std)
            if moe.shared_gate
            else None
        )

    def gate_of(self, x_SBD: Tensor) -> list[Tensor]:
        """By how much each of this rank's tokens is scaled; nothing without a gate."""
        if self.gate is None:
            return []
        return [torch.sigmoid(F.linear(x_SBD, self.gate))]

    def forward(self, x_ND: Tensor) -> Tensor:
        """[N, D]; this rank's part of a sum, before the gate."""
        units_NF = activated(self.config, F.linear(x_ND, self.up.flatten(0, 1)))
        return F.linear(units_NF, self.down)


def activated(config: GptConfig, projected_TF: Tensor) -> Tensor:
    """The units of an expert, which has no biases; a gate's features come first."""
    match config.activation:
        case "swiglu" | "geglu" | "geglu_tanh" as kind:
            gate, x = projected_TF.chunk(2, dim=-1)
            return bias_gated(gate, x, None, None, kind)
        case kind:
            return bias_activation(projected_TF, None, kind)
