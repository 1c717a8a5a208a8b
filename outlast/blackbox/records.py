"""What a rank notes of itself: the words and records of its black box.

What does not belong here: how they are written and read (`outlast/blackbox/{writer,reader}.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    # New in Python 3.11, which a script need not have.
    from typing import Self

# Steps, tokens, bytes: what a double still counts one by one, and so every reader of them.
MAX_COUNT = 2**53 - 1
# The detail of an operation, a rank or a micro-batch: an int32 on the wire.
MAX_DETAIL = 2**31 - 1


class _Word(IntEnum):
    """A word of the black box. One that is no member reads as `unknown` (-1).

    The box is memory that a damaged worker may have written anything to, or a worker of another
    version. The unknown word is not among the members: they number the box's tables.
    """

    @classmethod
    def _missing_(cls, value: object) -> Self:
        unknown = int.__new__(cls, -1)
        unknown._name_ = "UNKNOWN"
        unknown._value_ = -1
        return unknown


class Phase(_Word):
    """What a rank is busy with."""

    STARTING = 0
    GROUPS = 1
    RESTORE = 2
    DATA = 3
    FORWARD_BACKWARD = 4
    GRADIENT_SYNC = 5
    OPTIMIZER = 6
    CHECKPOINT = 7
    EVALUATION = 8
    FINISHED = 9
    # Of a script: whatever it does in a step and does not name.
    STEP = 10
    # Python's, on all ranks after the same step.
    GARBAGE_COLLECTION = 11


class Pass(_Word):
    """What a rank computes of its part of the model, for one micro-batch."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2


class StepPart(IntEnum):
    """What a rank spends a step on, waiting for other ranks left out."""

    FORWARD = 0
    BACKWARD = 1
    DATA = 2
    OPTIMIZER = 3
    # Behind the step.
    CHECKPOINT = 4
    GARBAGE_COLLECTION = 5


class StartMark(IntEnum):
    """Moments of a worker's start, for the split of a recovery."""

    FORKED = 0
    GROUPS_READY = 1
    MODEL_READY = 2
    RESTORED = 3
    FIRST_STEP = 4


class Op(_Word):
    """Operations that can wait for another rank."""

    NONE = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    SEND = 5
    RECV = 6
    BARRIER = 7
    ALL_TO_ALL = 8


class Group(_Word):
    """Which peers an operation involves."""

    WORLD = 0
    TP = 1
    DP = 2
    PP = 3
    EMBEDDING = 4
    # Replicas that divide experts among them, and those that hold the same ones.
    EP = 5
    EXPERT_DP = 6
    # Ranks that divide sequences among them.
    CP = 7


_Named = TypeVar("_Named", Phase, Op, Group)


# Words only: names that are none are not kept.
@lru_cache(maxsize=256)
def member(kind: type[_Named], name: str) -> _Named:
    """The word of that name, in lower case as it goes over the wire.

    Raises:
        ValueError: there is none, as from an agent of another version.
    """
    try:
        return kind[name.upper()]
    except KeyError:
        known = [item.name.lower() for item in kind]
        raise ValueError(f"{name!r} is not one of {known}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One completed step. `loss` is the mean over the global batch.

    `tokens` is 0 for a step whose batch was left out; it has no loss.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    start_ns: int
    end_ns: int
    eval_loss: float | None
    # Of held-out sets that have names, whose mean is `eval_loss`.
    eval_losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What a completed step was spent on. `spent_ns` has one number per `StepPart`.

    `waited_ns` is time in operations that may wait for other ranks, whatever else went on.
    """

    step: int
    length_ns: int
    waited_ns: int
    spent_ns: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The operation that a rank entered last."""

    op: Op
    group: Group
    seq: int
    # As `OpRecord` has them.
    detail: int = -1
    peer: int = -1
    is_inside: bool

    @property
    def root(self) -> int:
        """Whose tensor all are to have, as a place in the group; -1 where there is none."""
        return self.detail if self.op is Op.BROADCAST else -1

    def __str__(self) -> str:
        where = "in" if self.is_inside else "after"
        root = f" from {self.root}" if self.root >= 0 else ""
        return f"{where} {self.group.name.lower()} {self.op.name.lower()} #{self.seq}{root}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """One operation that has ended."""

    op: Op
    group: Group
    seq: int
    # The micro-batch of a send or receive, the root's place in the group of a broadcast; else -1.
    detail: int
    start_ns: int
    end_ns: int
    # When this rank's messages left, where that was before it began to wait; else 0.
    departed_ns: int = 0
    # Of a send or receive: the other one's place in the group, and a number that its message
    # shares with no other that the receiver gets in a step; -1 where that is not known.
    peer: int = -1
    message: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """A phase that has ended, or a pass within one."""

    phase: Phase
    # NONE: it is the phase itself.
    work: Pass = Pass.NONE
    # Of a pass: which of the rank's parts of the model (virtual stages), and the micro-batch.
    chunk: int = 0
    micro_batch: int = -1
    start_ns: int
    end_ns: int
    # In operations of that time, which may wait for other ranks.
    waited_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """Where a rank's time has gone, in seconds since it opened its box.

    Operations lie within phases: what remains of a phase is the rank's own work.
    On a GPU phases are the host's, which mostly waits in GRADIENT_SYNC for what it gave the
    device before; operations are the device's.
    """

    phases_s: dict[Phase, float]
    operations_s: dict[tuple[Phase, Group], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUse:
    """What steps used: of one when written, of all so far when read."""

    forward_ns: int = 0
    """Time in forward passes, waiting for others left out; `backward_ns` likewise."""
    backward_ns: int = 0
    busy_ns: int = 0
    """Time of the pipeline's actions; `waited_ns`: of what they waited for in between."""
    waited_ns: int = 0
    hidden_ns: Mapping[Group, int] = field(default_factory=dict)
    """Time that messages were under way while the rank did something else."""
    sent_bytes: Mapping[Group, int] = field(default_factory=dict)
    data_wait_ns: int = 0
    """Time that the rank stood still because its batch was not read yet."""
    data_waits: int = 0
    """Steps in which it did."""
    peak_memory_bytes: int = 0
    """The largest so far. On a CPU: by how much the process has grown."""


def bubble_of(spent: Sequence[tuple[float, float]]) -> float | None:
    """Share of the time of a job's ranks that its pipeline's bubble takes; None before a step.

    `spent` says of each rank how long it was busy and how long it waited, in any unit. A rank does
    not note how long it idles after its last action, so the rank that takes longest over its
    actions and what they wait for says how long the pipeline takes.
    """
    whole = len(spent) * max((busy + waited for busy, waited in spent), default=0)
    return 1 - sum(busy for busy, _ in spent) / whole if whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What `outlast plan` says of a rank: to be held beside what it measures."""

    memory_bytes: int
    bubble: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """Where a rank stands now."""

    rank: int
    attempt: int
    pid: int
    phase: Phase
    phase_since_ns: int
    completed_step: int
    resumed_step: int
    op: Op
    group: Group
    op_seq: int
    # As `OpRecord` has them.
    detail: int
    op_entered_ns: int
    # Zero while the operation is still going on.
    op_left_ns: int
    # Sequence number entered last in each group, 0 for none.
    entered: Mapping[Group, int] = field(default_factory=dict)
    peer: int = -1
    world_size: int = 0

    @property
    def last_operation(self) -> Operation | None:
        """The operation entered last, if there was any."""
        if self.op is Op.NONE:
            return None
        return Operation(
            op=self.op,
            group=self.group,
            seq=self.op_seq,
            detail=self.detail,
            peer=self.peer,
            is_inside=self.op_left_ns == 0,
        )
