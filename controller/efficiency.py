"""How well a job uses its devices and its data, from its spec and its last step. Pure."""

from __future__ import annotations

import math
from functools import lru_cache

from controller.core.records import JobRecord
from controller.specs import spec_of
from controller.store.curves import StepRow
from outlast.flops import Convention, hardware_flops_per_token
from outlast.perplexity import perplexity
from outlast.sizing.of_spec import recompute_modes


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


def epochs(job: JobRecord, last: StepRow) -> float | None:
    """Passes over the data of training: the place of the next sample by how many there are.

    Batches that were left out were passed, too. Sources with weights are passed over at paces of
    their own, and count together.
    """
    if job.num_samples == 0:
        return None
    return last.step * spec_of(job.spec_json).data.global_batch / job.num_samples
