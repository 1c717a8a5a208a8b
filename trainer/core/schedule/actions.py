"""What a schedule is made of.

A schedule is, for every stage, the order of its actions: forward, and backward
either fused or split into input-gradient and weight-gradient parts (the parts
that zero-bubble schedules need). A stage may hold several model chunks; chunk
`c` of stage `s` stands at position `c * num_stages + s` of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class ActionKind(StrEnum):
    """What a stage does with one micro-batch of one chunk."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One entry of a stage's order of work."""

    kind: ActionKind
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of work of every stage; `actions[stage]` runs first to last.

    `trains`: some stage does more than forwards.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    num_chunks: int = 1
    actions: tuple[tuple[Action, ...], ...]
    trains: bool = field(init=False)

    def __post_init__(self) -> None:
        # Found once: it is asked for at every action, and an evaluation has to look at all.
        trains = any(a.kind is not ActionKind.FORWARD for work in self.actions for a in work)
        object.__setattr__(self, "trains", trains)

    @property
    def last_position(self) -> int:
        """Where the model ends."""
        return self.num_chunks * self.num_stages - 1

    def position(self, stage: int, chunk: int) -> int:
        """Where in the model a chunk of `stage` stands."""
        return chunk * self.num_stages + stage
