"""What training to the end takes: time, and devices by the hour.

A step that is projected is one without faults: what a fleet loses to them is estimated by
`outlast simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.sizing.parameters import PlanInput, total_parameters
from trainer.core.projection import Machine, Projection

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All steps of a job."""

    tokens: int
    projected_s: float
    by_formula_s: float
    """8TP / (nX), or 6TP / (nX) where nothing is computed a second time as a whole."""
    device_hours: float
    price: float
    """Of all of it, in the currency of a device-hour."""
    price_per_million_tokens: float


def training(
    facts: PlanInput, step: Projection, machine: Machine, *, steps: int, price_per_hour: float
) -> Training:
    """`steps` steps as long as the projected one.

    Source of the formula: Narayanan et al. (arXiv 2104.04473), equation 4, for T tokens, P
    parameters, n devices and X FLOP/s on each. It leaves out attention and vocabulary. Of
    experts, P are those that a token goes to.
    """
    devices = facts.layout.world_size
    tokens = steps * facts.global_batch * facts.model.shape.seq_len
    per_weight = 8 if set(facts.recompute) == {"full"} else 6
    reached = step.hfu_full * machine.peak_flops_per_s
    hours = steps * step.step_s * devices / _HOUR_S
    return Training(
        tokens=tokens,
        projected_s=steps * step.step_s,
        by_formula_s=per_weight * tokens * _used_parameters(facts) / (devices * reached),
        device_hours=hours,
        price=hours * price_per_hour,
        price_per_million_tokens=hours * price_per_hour / tokens * 1e6,
    )


def _used_parameters(facts: PlanInput) -> int:
    """All but those of experts that a token does not go to."""
    shape, unused = facts.model.shape, 0
    for layer in range(shape.layers):
        experts = shape.experts_of(layer)
        if experts is not None:
            left = experts.number - experts.per_token
            unused += left * shape.hidden * shape.mlp_matrices * experts.hidden
    return total_parameters(facts) - unused
