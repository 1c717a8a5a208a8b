"""Which experts a token goes to, and the losses that keep their use even.

The router is computed in fp32 at least. Its losses are of one micro-batch of a replica:

- balance (Switch Transformer, arXiv 2101.03961, eq. 4-6): E sum_e f_e p_e, with f_e the share of
  choices that fell on expert e and p_e its mean probability. Over each layer, added up, as
  Megatron-LM has it; or over all layers at once with f_e in parts of the tokens, as in
  `transformers`.
- z (ST-MoE, arXiv 2202.08906, eq. 5): the mean square of log sum_e exp(logit_e).

What they are made of is added up from layer to layer, and goes on to the next pipeline stage
beside the stream (`carried`), so that the last one knows the sums over all layers, and
gradients come back the same way. With sequence parallelism each rank has the terms of its own
tokens, with f_e of all; so have ranks that divide the sequence.
"""

# S sequence, B micro-batch, E experts, K choices of a token, D model width.
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.config import GptConfig, MoeConfig
from trainer.model.layers import Layer
from trainer.parallel.comm import Comm
from trainer.parallel.mesh import Mesh
from trainer.parallel.tensor import TensorParallel, total


class Routing(NamedTuple):
    """A token's choices, their weights, and what the router's losses need of all experts."""

    chosen_SBK: Tensor
    weights_SBK: Tensor
    logits_SBE: Tensor
    probabilities_SBE: Tensor


class Router(Layer):
    """The probability of each expert for each token, of which the largest are chosen."""

    def __init__(self, config: GptConfig, mesh: Mesh, moe: MoeConfig) -> None:
        super().__init__(config, mesh)
        self._moe = moe
        shape = (moe.num_experts, config.hidden)
        self.weight = self.declare("weight", shape, init="normal", std=config.init_std)

    def forward(self, x_SBD: Tensor) -> Routing:
        exact = torch.promote_types(x_SBD.dtype, torch.float32)
        logits_SBE = F.linear(x_SBD.to(exact), self.weight.to(exact))
        probabilities_SBE = torch.softmax(logits_SBE, dim=-1)
        weights_SBK, chosen_SBK = torch.topk(probabilities_SBE, self._moe.per_token, dim=-1)
        if self._moe.normalises:
            weights_SBK = weights_SBK / weights_SBK.sum(dim=-1, keepdim=True)
        return Routing(chosen_SBK, weights_SBK, logits_SBE, probabilities_SBE)


def over_parts(counts: Tensor, cp: Comm) -> Tensor:
    """What is counted in each part of a sequence, over all of it."""
    return counts if cp.size == 1 else cp.all_gather(counts.unsqueeze(0)).sum(dim=0)


def no_terms(config: GptConfig, device: torch.device) -> Tensor | None:
    """What the first layer adds its terms to; None: the router has no losses."""
    if config.num_router_terms == 0:
        return None
    dtype = torch.promote_types(config.dtype, torch.float32)
    return torch.zeros(config.num_router_terms, dtype=dtype, device=device)


def layer_terms(moe: MoeConfig, routing: Routing, counts_E: Tensor) -> Tensor:
    """A layer's terms; `counts_E` are choices by expert, of the whole micro-batch's tokens.

    The first is a loss as it stands; over all layers there are counts and probabilities besides.
    """
    logits, probabilities = routing.logits_SBE, routing.probabilities_SBE.flatten(0, 1)
    counts_E = counts_E.to(logits.dtype)
    num_tokens = counts_E.sum() / moe.per_token
    summed_E = probabilities.sum(dim=0)
    loss = moe.z_loss * torch.logsumexp(logits, dim=-1).square().sum() / num_tokens
    if moe.aux_loss_over == "layer":
        balance = (counts_E * summed_E).sum() / (num_tokens**2 * moe.per_token)
        return (loss + moe.aux_loss * moe.num_experts * balance).view(1)
    if moe.aux_loss == 0:
        return loss.view(1)
    return torch.cat((loss.view(1), counts_E / num_tokens, summed_E / num_tokens))


def router_loss(config: GptConfig, tp: TensorParallel, terms: Tensor) -> Tensor:
    """The loss of all layers' terms, the same on each tensor rank; the own part of it, where ranks
    divide the sequence."""
    moe = config.moe
    assert moe is not None, "there are terms"
    loss, rest = terms[0], terms[1:]
    if len(rest):
        shares_E, means_E = (rest / config.num_moe_layers).chunk(2)
        loss = loss + moe.aux_loss * moe.num_experts * (shares_E * means_E).sum()
    return total(loss, tp.comm) if tp.sequence_parallel else loss
