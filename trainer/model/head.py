"""What an output projection may have besides its table: a layer before it, and a bias.

Source: BERT's masked language model (arXiv 1810.04805), as its code has it.
"""

# S sequence, B micro-batch, D model width, V vocabulary.
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from trainer.model.config import GptConfig
from trainer.model.fused import bias_activation
from trainer.model.layers import Layer, Norm
from trainer.parallel.mesh import Mesh


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
