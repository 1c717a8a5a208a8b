"""Norms of queries and keys before they turn: of each head, or of all heads together.

Each head by itself is normalised where it is. All heads together are spread over the tensor
group, whose ranks sum two numbers for each token: squares of its queries and of its keys.

Sources: QK-norm (arXiv 2302.05442); Qwen 3 (2505.09388), by head; OLMo 2 (2501.00656), together.
"""

# S sequence, B micro-batch, H query heads, G key/value heads, C head width. Sizes are a
# rank's own.
from __future__ import annotations

import torch
from torch import Tensor

from trainer.model.by_group import ranks_of_group
from trainer.model.config import GptConfig
from trainer.model.fused import layer_norm, rms_norm
from trainer.model.layers import Layer, declare_norm_weight, norm_factor
from trainer.parallel.comm import Comm
from trainer.parallel.mesh import Mesh
from trainer.parallel.tensor import group_rows, group_total, summed_grad


class QkNorm(Layer):
    """The weights of such norms. Of each head: one for all of a kind, on all tensor ranks.

    Of all heads together: one for each value, on the rank that has the value.
    """

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        together = config.qk_norm == "all"
        shard_dim = 0 if together else None
        key_heads = config.groups if together else 1
        query_width = config.query_width if together else config.head_width
        self.query = declare_norm_weight(self, "query", query_width, shard_dim=shard_dim)
        self.key = declare_norm_weight(
            self, "key", key_heads * config.head_width, shard_dim=shard_dim
        )

    def factors(self) -> tuple[Tensor, Tensor]:
        """What queries and keys are multiplied with, on this rank's heads: [C], or [H, C]."""
        query: Tensor = self.query
        key: Tensor = self.key
        comm, config = self.tp.comm, self.config
        if config.qk_norm == "all":
            shares = ranks_of_group(config, comm.size)
            key = key if shares == 1 else group_rows(key, comm, shares)
            query, key = (each.view(-1, config.head_width) for each in (query, key))
        elif not self.tp.sequence_parallel:
            # Each rank has some of the heads. With sequence parallelism the gradients of all
            # that is replicated are summed once a step; without it this has to be done here.
            query, key = summed_grad(query, comm), summed_grad(key, comm)
        return norm_factor(config, query), norm_factor(config, key)


def normed(
    q_SBHC: Tensor, k_SBGC: Tensor, factors: tuple[Tensor, ...], config: GptConfig, comm: Comm
) -> tuple[Tensor, Tensor]:
    """Queries and keys after the norm that the config has, times its factors."""
    query, key = factors
    if config.qk_norm == "all":
        return _normed_together(q_SBHC, k_SBGC, factors, config, comm)
    if config.norm == "rmsnorm":
        return rms_norm(q_SBHC, query, config.norm_eps), rms_norm(k_SBGC, key, config.norm_eps)
    return (
        layer_norm(q_SBHC, query, None, config.norm_eps),
        layer_norm(k_SBGC, key, None, config.norm_eps),
    )


def _normed_together(
    q_SBHC: Tensor, k_SBGC: Tensor, factors: tuple[Tensor, ...], config: GptConfig, comm: Comm
) -> tuple[Tensor, Tensor]:
    # Of narrow types a sum over thousands of values would lose the last of them.
    exact = torch.promote_types(q_SBHC.dtype, torch.float32)
    # Keys that ranks share are counted by each of them.
    copies = (1, ranks_of_group(config, comm.size))
    squares = [
        x.to(exact).square().sum(dim=(2, 3)) / copy
        for x, copy in zip((q_SBHC, k_SBGC), copies, strict=True)
    ]
    sums = group_total(torch.stack(squares), comm)
    widths = (config.query_width, config.groups * config.head_width)
    query, key = (
        (x * torch.rsqrt(total / width + config.norm_eps).to(x.dtype)[..., None, None]) * factor
        for x, total, width, factor in zip(
            (q_SBHC, k_SBGC), sums.unbind(), widths, factors, strict=True
        )
    )
    return query, key
