"""What BERT has besides a table at its output: a layer before it, a bias, and a second loss.

Source: BERT (arXiv 1810.04805), as its code has it; what the second loss says is ALBERT's
(arXiv 1909.11942, 3.1).
"""

# S sequence, B micro-batch, D model width, V vocabulary.
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.config import GptConfig
from trainer.model.fused import bias_activation
from trainer.model.layers import Layer, Norm
from trainer.parallel.mesh import Mesh
from trainer.parallel.tensor import total


class HeadTransform(Layer):
    """A linear layer of the model's width, an activation and a norm; all ranks have all of it.

    With sequence parallelism each transforms its part of the sequence.
    """

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        shape = (config.hidden, config.hidden)
        self.weight = self.declare("weight", shape, init="normal", std=config.init_std)
        self.bias = self.declare("bias", (config.hidden,), init="zeros")
        self.norm = Norm(config, mesh)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """[S, B, D] to the same."""
        out: Tensor = self.norm(self._activated(F.linear(x_SBD, self.weight)))
        return out

    def _activated(self, x_SBD: Tensor) -> Tensor:
        match self.config.activation:
            case "swiglu" | "geglu" | "geglu_tanh":
                raise AssertionError("the rules of a spec refuse a gate here")
            case kind:
                return bias_activation(x_SBD, self.bias, kind)


class VocabBias(Layer):
    """A bias for each token id, beside a table that is the input's, too; split as that is."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self.weight = self.declare("weight", (config.table_rows,), init="zeros", shard_dim=0)


class OrderHead(Layer):
    """Predicts whether the two parts of a sequence are swapped; all ranks have all of it."""

    def __init__(self, config: GptConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self.pooler = _Linear(config, mesh, features=config.hidden)
        self.classifier = _Linear(config, mesh, features=2)
        self._wide = torch.promote_types(config.dtype, torch.float32)

    def forward(self, x_SBD: Tensor, swapped_B: Tensor) -> Tensor:
        """The sequences' summed loss, of the first token of each; the same on each tensor rank.

        0 on a rank whose part of the sequence is not the first.
        """
        # With sequence parallelism the first rank has the first tokens; the others compute on
        # zeros, so that nothing of other tokens comes in, and their gradients are zeros, too.
        # So it is where ranks divide the sequence.
        in_part = self.comm.index == 0 or not self.tp.sequence_parallel
        has_first = in_part and self.cp.index == 0
        first_BD = x_SBD[0] if has_first else torch.zeros_like(x_SBD[0])
        logits = self.classifier(torch.tanh(self.pooler(first_BD)))
        loss = F.cross_entropy(logits.to(self._wide), swapped_B, reduction="sum")
        if self.tp.sequence_parallel:
            return total(loss * has_first, self.comm)
        return loss if has_first else loss * 0.0


class _Linear(Layer):
    def __init__(self, config: GptConfig, mesh: Mesh, *, features: int) -> None:
        super().__init__(config, mesh)
        shape = (features, config.hidden)
        self.weight = self.declare("weight", shape, init="normal", std=config.init_std)
        self.bias = self.declare("bias", (features,), init="zeros")

    def forward(self, x_BD: Tensor) -> Tensor:
        return F.linear(x_BD, self.weight, self.bias)
