"""How well a job uses its devices and its data, from its spec and its last step. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from controller.core.environments import device_in
from controller.core.records import JobRecord
from controller.core.states import JobState
from controller.specs import spec_of
from controller.store.curves import StepRow
from outlast.devices import MEASURED, reported_device
from outlast.flops import Convention, hardware_flops_per_token
from outlast.ids import NodeId
from outlast.perplexity import perplexity
from outlast.sizing.of_spec import recompute_modes


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What all devices of a job could do together, and by whose word."""

    name: str
    """Of the device, or `MEASURED`."""
    flops_per_s: float


def peak_of(job: JobRecord, matmul_flops: Mapping[NodeId, float]) -> Peak | None:
    """By the data sheet of its device, else by the matmul check of its nodes, in FLOP/s of a
    worker; None where neither is known."""
    device, spec = reported_device(device_in(job.environment)), spec_of(job.spec_json)
    if device is not None:
        peak = device.peak_flops_per_s[spec.precision]
        return Peak(name=device.name, flops_per_s=peak * job.plan.world_size)
    rates = [matmul_flops[node] for node in job.nodes if node is not None and node in matmul_flops]
    # The check is in float32: another precision has another peak.
    is_known = 0 < len(rates) == len(job.nodes) and sum(rates) > 0
    if not is_known or spec.precision != "fp32":
        return None
    return Peak(name=MEASURED, flops_per_s=sum(rates) * job.plan.workers_per_node)


@lru_cache(maxsize=1024)
def hardware_flops(spec_json: str, convention: Convention) -> float:
    """FLOPs that the devices do for a token, with those that recompute adds."""
    spec = spec_of(spec_json)
    return hardware_flops_per_token(spec.model.shape, recompute_modes(spec), convention)


def token_perplexity(job: JobRecord, last: StepRow) -> float | None:
    """exp(loss) of a step, where the loss is the mean cross-entropy of tokens in nats.

    What a script calls its loss is not known. That of a job which predicts the order of sentences,
    or balances experts by a term of the loss, has a part that is of no token.
    """
    spec = spec_of(job.spec_json)
    has_more = spec.model.sentence_order or spec.model.moe.num_router_terms > 0
    if spec.is_script or has_more or last.is_left_out:
        return None
    found = perplexity(last.loss)
    return found if math.isfinite(found) else None


def time_left_s(job: JobRecord, last: StepRow, step_s: float | None) -> float | None:
    """Seconds until the last step at `step_s` a step; None for what does no steps now.

    That is a job which is not RUNNING or has done them all, and a script, whose end is not known.
    """
    total = job.plan.total_steps
    if job.state is not JobState.RUNNING or not total or not step_s or last.step >= total:
        return None
    return (total - last.step) * step_s


def epochs(job: JobRecord, last: StepRow) -> float | None:
    """Passes over the data of training: the place of the next sample by how many there are.

    Batches that were left out were passed, too. Sources with weights are passed over at paces of
    their own, and count together.
    """
    if job.num_samples == 0:
        return None
    return last.step * spec_of(job.spec_json).data.global_batch / job.num_samples
