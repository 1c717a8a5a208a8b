"""What the controller tells apart: the closed sets of words that records, rules and metrics use."""

from __future__ import annotations

from enum import StrEnum


class Wanted(StrEnum):
    """What the user wants of a job."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


class Cause(StrEnum):
    """What an incident was about: the closed set that metrics use as a label."""

    UNKNOWN = "unknown"
    WORKER_KILLED = "worker_killed"
    WORKERS_MISSING = "workers_missing"
    USER_ERROR = "user_error"
    TRANSIENT = "transient"
    OUT_OF_MEMORY = "out_of_memory"
    STORAGE = "storage"
    CHECKPOINT = "checkpoint"
    DEVICE = "device"
    CONFIG = "config"
    NODE_LOST = "node_lost"
    NODE_UNRESPONSIVE = "node_unresponsive"
    NODE_UNHEALTHY = "node_unhealthy"
    NODE_DRAINED = "node_drained"
    NODE_LEFT = "node_left"
    HANG = "hang"
    NON_FINITE = "non_finite"
    SILENT_CORRUPTION = "silent_corruption"
    SPIKE = "spike"
    STRAGGLER = "straggler"
    DATA_STALL = "data_stall"
    SLOWDOWN = "slowdown"
    MFU_DECLINE = "mfu_decline"
    PERIODIC_STALL = "periodic_stall"
    LATE_LAUNCHES = "late_launches"
    HOST_MEMORY = "host_memory"
    DISK = "disk"
    NODE_CONDITION = "node_condition"
    KERNEL_LOG = "kernel_log"
    TRAFFIC = "traffic"
    WORKER_LOG = "worker_log"
    MISFIT = "misfit"


class Action(StrEnum):
    """What the policy chose."""

    RESTART_IN_PLACE = "restart_in_place"
    DIAGNOSE = "diagnose"
    SWAP_NODES = "swap_nodes"
    REPLACE_NODES = "replace_nodes"
    SKIP_BATCH = "skip_batch"
    ROLL_BACK = "roll_back"
    PAUSE = "pause"
    FAIL = "fail"


class NonFiniteAgain(StrEnum):
    """What is done about a step that is not a number the second time either."""

    SKIP = "skip"
    ROLLBACK = "rollback"
    FAIL = "fail"


class Rung(StrEnum):
    """What may be done about a fault: the rungs of the ladder of recovery, cheapest first."""

    RESTART = "restart"
    DIAGNOSE = "diagnose"
    REPLACE = "replace"
    PAUSE = "pause"


class EvidenceKind(StrEnum):
    """What kind of sign a piece of evidence is."""

    WORKER_EXIT = "worker_exit"
    WORKERS_MISSING = "workers_missing"
    NODE_LOST = "node_lost"
    NODE_LEFT = "node_left"
    START_FAILED = "start_failed"
    START_LOST = "start_lost"
    NOT_STOPPED = "not_stopped"
    STALLED = "stalled"
    STACKS = "stacks"
    DETECTED = "detected"
    NO_FIRST_STEP = "no_first_step"
    DIAGNOSTICS = "diagnostics"
    DRAIN = "drain"
    CHECKPOINT = "checkpoint"
