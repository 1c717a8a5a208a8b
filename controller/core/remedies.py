"""What a user can change so that a fault does not come again, by fields of the spec.

Only where the class of the fault says so; it is put behind the reason of the verdict.
"""

from __future__ import annotations

from controller.core.evidence import NO_STEP_IN_TIME
from controller.core.frozen import replace
from controller.core.verdict import PolicyInput, PolicyVerdict, first_failure
from outlast.failures import FailureClass

_DEVICE = (
    "parallel.recompute: selective or full, a smaller parallel.micro_batch, parallel.zero.level: "
    "1, 2 or 3, or more parallel.tp or parallel.pp"
)
_NEED_LESS = {
    FailureClass.CUDA_OOM: (
        f"what needs less device memory: {_DEVICE}; `outlast plan` estimates each"
    ),
    FailureClass.OOM_HOST: (
        "what needs less host memory: fewer resources.workers_per_node, checkpoint.replicas: 0, "
        "nodes with more memory (or a higher limit of their container); where workers train on "
        f"the CPU also {_DEVICE}; `outlast plan` estimates each"
    ),
}


# Where steps take longer than a hang may, each attempt does one step more: a first step has a
# limit of its own.
LONGER_STEPS = (
    "raise recovery.hang_timeout_s if a step of the job (with its evaluation and checkpoint) takes "
    "longer"
)
STEPS_APART = 1


def with_remedy(verdict: PolicyVerdict, facts: PolicyInput) -> PolicyVerdict:
    """The verdict, and what the user can change, where that is known."""
    failure = first_failure(facts.evidence)
    remedy = "" if failure is None else _NEED_LESS.get(failure.fault_class, "")
    if failure is None and _hangs_again(facts):
        remedy = LONGER_STEPS
    if not remedy or remedy in verdict.reason:
        return verdict
    return replace(verdict, reason=f"{verdict.reason}; {remedy}")


def _hangs_again(facts: PolicyInput) -> bool:
    """Whether the fault before this one was as long a step, and hardly a step ago."""
    return (
        facts.last_fingerprint == NO_STEP_IN_TIME
        and any(item.fingerprint == NO_STEP_IN_TIME for item in facts.evidence)
        and facts.fault_step <= facts.last_fault_step + STEPS_APART
    )
