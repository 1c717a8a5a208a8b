"""LAMB: AdamW's direction, scaled for each tensor by how large the tensor is.

Algorithm 2 of You et al., "Large Batch Optimization for Deep Learning" (arXiv
1904.00962): with r the bias-corrected Adam direction and lambda the decay, a
tensor x moves by lr * phi(|x|) / |r + lambda x| along r + lambda x, where
phi(z) = min(max(z, phi_min), phi_max).

Norms are of the whole tensor, whatever the layout: every rank adds up squares
over what it owns, and one small message per axis adds those up in rank order.
Norms and biases, which do not decay, keep the ratio 1: a bias that starts at
zero would otherwise hardly ever move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.model.parameters import FlatParameters, Part
from trainer.optim.adam import AdamMoments, AdamWConfig, ignore
from trainer.optim.norms import square_sum, sum_in_order
from trainer.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class LambConfig:
    """The constants of LAMB; `phi_max` None leaves large tensors alone."""

    adam: AdamWConfig
    phi_min: float
    phi_max: float | None

    def phi(self, norm: float) -> float:
        """The size of a tensor, as far as it counts."""
        raised = max(norm, self.phi_min)
        return raised if self.phi_max is None else min(raised, self.phi_max)


class FlatLamb(AdamMoments):
    """One update of all tensors: their norms are summed over ranks before any moves."""

    def __init__(self, flat: FlatParameters, config: LambConfig, mesh: Mesh) -> None:
        super().__init__(flat, config.adam)
        self._flat = flat
        self.config = config
        self._mesh = mesh
        divided = {facts.stored for facts in flat.facts.values() if facts.divided}
        self._names = list(
            dict.fromkeys(facts.stored for facts in flat.facts.values() if facts.decays)
        )
        self._divided = [row for row, name in enumerate(self._names) if name in divided]

    @torch.no_grad()
    def step(
        self,
        step: int,
        learning_rate: float,
        *,
        changes: Callable[[Tensor], None] = ignore,
        updated: Callable[[Part], None] = ignore,
    ) -> None:
        """One update from the gradients of the own parts; `step` counts updates from 1.

        `changes` is called with each buffer before it changes, `updated` with each part as
        soon as its weights are new.
        """
        directions = [self._direction(part, step, changes) for part in self._flat.parts]
        ratios = self._trust_ratios(directions)
        for part, direction in zip(self._flat.parts, directions, strict=True):
            for piece in part.pieces:
                stored = self._flat.facts[piece.name].stored
                direction[piece.at].mul_(ratios.get(stored, 1.0))
            changes(part.master)
            part.master.add_(direction, alpha=-learning_rate)
            updated(part)

    def _direction(self, part: Part, step: int, changes: Callable[[Tensor], None]) -> Tensor:
        """Where a part moves: Adam's direction and the decay, before it is scaled."""
        config = self._config
        changes(self.exp_avg[part.place])
        changes(self.exp_avg_sq[part.place])
        exp_avg, direction = self._advance(part, step)
        torch.div(exp_avg, direction, out=direction)
        direction.div_(1.0 - config.beta1**step)
        decayed = part.among(part.bucket.decayed)
        direction[decayed].add_(part.master[decayed], alpha=config.weight_decay)
        return direction

    def _trust_ratios(self, directions: Sequence[Tensor]) -> dict[str, float]:
        """phi(|x|) / |direction| of every tensor that decays; 1 where a norm is 0."""
        squares = self._whole_squares(directions)
        ratios = {}
        for name, (weight, direction) in zip(self._names, squares.sqrt().tolist(), strict=True):
            usable = weight > 0.0 and direction > 0.0
            ratios[name] = self.config.phi(weight) / direction if usable else 1.0
        return ratios

    def _whole_squares(self, directions: Sequence[Tensor]) -> Tensor:
        """Squared norms of weights and directions, [names, 2] in fp64, of whole tensors."""
        flat, mesh = self._flat, self._mesh
        rows = {name: row for row, name in enumerate(self._names)}
        squares = torch.zeros(len(rows), 2, dtype=torch.float64, device=self.exp_avg.device)
        for part, direction in zip(flat.parts, directions, strict=True):
            for piece in part.pieces:
                facts = flat.facts[piece.name]
                # What all tensor ranks hold counts once.
                if facts.stored in rows and (facts.is_sharded or mesh.at.tp == 0):
                    row = squares[rows[facts.stored]]
                    row[0] += square_sum(part.master[piece.at])
                    row[1] += square_sum(direction[piece.at])
        for comm in (mesh.tp, mesh.dp) if flat.level else (mesh.tp,):
            if comm.size > 1:
                squares = sum_in_order(comm.all_gather(squares.unsqueeze(0)))
        if mesh.ep.size > 1 and not flat.level:
            # All replicas have the same of everything but experts.
            whole = sum_in_order(mesh.ep.all_gather(squares.unsqueeze(0)))
            squares[self._divided] = whole[self._divided]
        return squares
