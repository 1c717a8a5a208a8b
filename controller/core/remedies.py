"""What a user can change so that a fault does not come again, by fields of the spec.

Only where the class of the fault says so; it is put behind the reason of the verdict.
"""

from __future__ import annotations

from dataclasses import replace

from controller.core.verdict import Facts, Verdict, root_failure
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


def with_remedy(verdict: Verdict, facts: Facts) -> Verdict:
    """The verdict, and what the user can change, where that is known."""
    root = root_failure(facts.evidence)
    remedy = "" if root is None else _NEED_LESS.get(root.fault_class, "")
    if not remedy or remedy in verdict.reason:
        return verdict
    return replace(verdict, reason=f"{verdict.reason}; {remedy}")
