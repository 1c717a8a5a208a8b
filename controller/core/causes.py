"""What follows from the class of a worker's end, for every class that there is.

What does not belong here: what is done about it (`policy` and its rules).
"""

from __future__ import annotations

from typing import assert_never

from controller.core.kinds import Cause
from outlast.failures import FailureClass

NON_FINITE = (
    FailureClass.NON_FINITE,
    FailureClass.NON_FINITE_OWN,
    FailureClass.NON_FINITE_GRADIENT,
)
CORRUPT = (FailureClass.CORRUPT, FailureClass.CORRUPT_SOMEWHERE)
# All ranks end of these alike: who ended first did nothing that the others did not.
UNATTRIBUTABLE = (FailureClass.NON_FINITE_GRADIENT, FailureClass.CORRUPT_SOMEWHERE)
# Of no node in particular.
WITHOUT_CULPRIT = (*UNATTRIBUTABLE, FailureClass.ENDED_EARLY)
# How ranks end when an agent elsewhere takes its workers along.
WHEN_PEERS_DIE = (FailureClass.CASCADE, FailureClass.NCCL)
# The job does not fit its node: the node does not have it, or something else uses it now.
MISFITS = (FailureClass.MISFIT, FailureClass.OCCUPIED)
# A device or a link says it of itself: that it comes again is no sign of the program. Found in
# simulation: a device whose checks passed failed the job with free nodes beside it.
OF_HARDWARE = (FailureClass.DEVICE, FailureClass.NCCL)
# What a program hardly makes by itself.
OF_MACHINES = (Cause.TRANSIENT, Cause.DEVICE)


def is_deterministic(failure: FailureClass) -> bool:
    """Whether it is of the user's own code or settings, so that repeating them changes nothing."""
    return cause_of(failure) is Cause.USER_ERROR or failure is FailureClass.CUDA_OOM


def cause_of(failure: FailureClass) -> Cause:
    """What an incident is about whose workers ended of this."""
    match failure:
        case (
            FailureClass.USER_ERROR
            | FailureClass.PROGRAM_ERROR
            | FailureClass.MISSING
            | FailureClass.ENDED_EARLY
        ):
            return Cause.USER_ERROR
        case FailureClass.CUDA_OOM | FailureClass.OOM_HOST:
            return Cause.OUT_OF_MEMORY
        case FailureClass.STORAGE | FailureClass.LAST_CHECKPOINT:
            return Cause.STORAGE
        case FailureClass.CHECKPOINT:
            return Cause.CHECKPOINT
        case FailureClass.CONFIG:
            return Cause.CONFIG
        # A kernel fails because of its device or of the program. Checks of the device tell which,
        # as where it reports the fault itself; another start would only tell that it came again.
        case FailureClass.DEVICE | FailureClass.DEVICE_KERNEL:
            return Cause.DEVICE
        case FailureClass.KILLED_BY_SIGNAL:
            return Cause.WORKER_KILLED
        case (
            FailureClass.NON_FINITE | FailureClass.NON_FINITE_OWN | FailureClass.NON_FINITE_GRADIENT
        ):
            return Cause.NON_FINITE
        case FailureClass.CORRUPT | FailureClass.CORRUPT_SOMEWHERE:
            return Cause.SILENT_CORRUPTION
        case FailureClass.MISFIT | FailureClass.OCCUPIED:
            return Cause.MISFIT
        case FailureClass.RESOURCE | FailureClass.INTERNAL:
            return Cause.NODE_UNHEALTHY
        # What another start may not meet again, as far as is known.
        case (
            FailureClass.NONE
            | FailureClass.CLEAN
            | FailureClass.CASCADE
            | FailureClass.NCCL
            | FailureClass.UNKNOWN
        ):
            return Cause.TRANSIENT
        case _:
            assert_never(failure)
