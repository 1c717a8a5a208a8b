"""What kind of failure a sign of a fault is about, and why a command failed: closed sets.

The controller decides by them, so each `match` on one closes with `assert_never`: a new member is
an error of the type checker wherever nothing is decided for it yet. Values stand in journals and
on the wire and do not change.

What does not belong here: which messages mean which class (`diagnostics.core.rules.exits`), and
what is done about one (`controller.core.policy`).
"""

from __future__ import annotations

from outlast.enums import StrEnum


class FailureClass(StrEnum):
    """What kind of failure ended a worker, or kept it from starting."""

    NONE = ""  # the sign is no end of a worker and no refused start
    CLEAN = "clean"  # it did not fail
    USER_ERROR = "user_error"  # the user's code or settings, perhaps at this moment only
    PROGRAM_ERROR = "program_error"  # the user's code: the same input would raise it again
    # Exit code 0 before the job's last step. Whatever made it do so (`sys.exit(0)` in a library)
    # is the program: no node makes a process end like that.
    ENDED_EARLY = "ended_early"
    MISSING = "missing"  # a file or module is not there, or may not be read
    CASCADE = "cascade"  # another rank died or hangs, this one noticed
    OOM_HOST = "oom_host"  # host memory ran out
    CUDA_OOM = "cuda_oom"  # device memory ran out
    DEVICE = "device"  # the accelerator reports a fault of its own
    DEVICE_KERNEL = "device_kernel"  # what ran on it went wrong: its own fault, or the program's
    NON_FINITE = "non_finite"  # the loss that it computed was not a number
    NON_FINITE_OWN = "non_finite_own_gradient"  # the loss was one, and its own gradient was not
    NON_FINITE_GRADIENT = "non_finite_gradient"  # only the gradient was not; nobody knows whose
    CORRUPT = "corrupt"  # its replica computed other bits than another one
    CORRUPT_SOMEWHERE = "corrupt_somewhere"  # its replica did, or the other one
    STORAGE = "storage"  # a file system or object store refused
    CHECKPOINT = "checkpoint"  # checkpoints were committed, and none of them can be loaded
    LAST_CHECKPOINT = "last_checkpoint"  # that of the job's last step did not get to storage
    NCCL = "nccl"  # the collective library failed by itself
    CONFIG = "config"  # a field of the spec asks for what cannot be done
    MISFIT = "misfit"  # the job asks for more than the node has
    OCCUPIED = "occupied"  # the node has it, but something else uses it now
    RESOURCE = "resource"  # the node could not start it though it should
    INTERNAL = "internal"  # the agent's own mistake
    KILLED_BY_SIGNAL = "killed_by_signal"  # the reason is not known
    # Nothing is known, or what another version wrote is not known to this one.
    UNKNOWN = "unknown"


class ErrorKind(StrEnum):
    """Why a command failed, by who must do something about it."""

    NONE = ""
    CONFIG = "config"
    # The job asks for more than the node has; or the node has it, but it is in use.
    MISFIT = "misfit"
    OCCUPIED = "occupied"
    # A place that the job names is not there: on this node, or on any.
    MISSING = "missing"
    # The node cannot though it should.
    RESOURCE = "resource"
    # The job's storage does not answer, on this node or any other.
    STORAGE = "storage"
    STALE = "stale"
    INTERNAL = "internal"
