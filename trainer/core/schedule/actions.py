"""What a schedule is made of.

A schedule is, for every stage, the order of its actions: forward, and backward
either fused or split into input-gradient and weight-gradient parts (the parts
that zero-bubble schedules need). A stage may hold several model chunks, which
`outlast.sizing.partition` places in the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from outlast.sizing.partition import chunk_at, position_of


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

    `folds`: every second chunk goes through the stages from the last to the first. `trains`: some
    stage does more than forwards.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    num_chunks: int = 1
    folds: bool = False
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
        return position_of(stage, chunk, self.num_stages, folds=self.folds)

    def chunk_at(self, position: int) -> tuple[int, int]:
        """(stage, chunk) that stands there."""
        return chunk_at(position, self.num_stages, folds=self.folds)

    def loss_chunk(self, stage: int) -> int | None:
        """Which chunk of `stage` ends the model, if one does."""
        last, chunk = self.chunk_at(self.last_position)
        return chunk if stage == last else None
