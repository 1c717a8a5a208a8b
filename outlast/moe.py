"""The section of a model that has several MLPs in a layer and a router that chooses among them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outlast.section import Section


class MoeSpec(Section):
    """Mixture of experts: MLPs among which a router chooses for each token. None is dropped."""

    num_experts: int = Field(0, ge=0, description="Experts of a layer; 0: no layer has any.")
    experts_per_token: int = Field(2, ge=1, description="Experts that each token goes through.")
    ffn_hidden: int | None = Field(
        None, ge=1, description="Width of an expert; model.ffn_hidden unless given."
    )
    norm_topk_prob: bool = Field(
        True, description="A token's weights of its experts are divided by their sum (Mixtral)."
    )
    pattern: tuple[Literal["experts", "dense"], ...] = Field(
        ("experts",),
        min_length=1,
        description="Which layers have experts, repeated over the depth; the others have an MLP "
        "of model.ffn_hidden.",
    )
    shared_ffn_hidden: int = Field(
        0,
        ge=0,
        description="Width of one more expert, which all tokens go through (DeepSeek: that of all "
        "shared ones together); 0: none.",
    )
    shared_gate: bool = Field(
        False,
        description="The shared expert's output is scaled by the sigmoid of a projection of the "
        "token (Qwen2-MoE).",
    )
    router_aux_loss_coef: float = Field(
        0.0, ge=0, description="Factor on the loss that balances experts, added in training."
    )
    router_aux_loss_over: Literal["layer", "model"] = Field(
        "layer",
        description="layer: of each layer E x sum of f p, added up, f an expert's share of the "
        "choices and p its mean probability over a micro-batch (Switch, Megatron-LM). model: as "
        "transformers has it, f and p over all layers, f in parts of the tokens.",
    )
    router_z_loss_coef: float = Field(
        0.0,
        ge=0,
        description="Factor on the mean square of the router's log-sum-exp, of each layer added "
        "up (ST-MoE).",
    )

    @property
    def num_router_terms(self) -> int:
        """Numbers that the router's losses are made of, on their way through the layers."""
        aux_loss = self.router_aux_loss_coef
        if aux_loss == 0 and self.router_z_loss_coef == 0:
            return 0
        is_joint = aux_loss > 0 and self.router_aux_loss_over == "model"
        return 1 + (2 * self.num_experts if is_joint else 0)
