"""A schedule run on paper, each stage as early as what it needs is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from trainer.core.schedule.actions import Action, ActionKind, Schedule


class ScheduleError(ValueError):
    """A schedule that cannot run or does not do the whole work."""


# A backward pass is two matrix products for each one of the forward pass.
DEFAULT_COSTS: Mapping[ActionKind, float] = MappingProxyType(
    {
        ActionKind.FORWARD: 1.0,
        ActionKind.BACKWARD: 2.0,
        ActionKind.BACKWARD_INPUT: 1.0,
        ActionKind.BACKWARD_WEIGHT: 1.0,
    }
)

# (position in the model, micro-batch, "forward" | "input" | "weight")
_Node = tuple[int, int, str]

_PARTS: Mapping[ActionKind, tuple[str, ...]] = MappingProxyType(
    {
        ActionKind.FORWARD: ("forward",),
        ActionKind.BACKWARD: ("input", "weight"),
        ActionKind.BACKWARD_INPUT: ("input",),
        ActionKind.BACKWARD_WEIGHT: ("weight",),
    }
)


class Replay:
    """How far every stage has come; `clock[stage]` is when its last action ended."""

    def __init__(
        self, schedule: Schedule, costs: Mapping[ActionKind, float] = DEFAULT_COSTS
    ) -> None:
        self.clock = [0.0] * schedule.num_stages
        self._schedule = schedule
        self._costs = costs
        self._done: dict[_Node, float] = {}
        self._next_index = [0] * schedule.num_stages

    def run(self) -> Iterator[tuple[int, Action]]:
        """Do all actions that can be done, each with its stage, after all that it needs."""
        progress = True
        while progress:
            progress = False
            for stage in range(self._schedule.num_stages):
                while (action := self.advance(stage)) is not None:
                    progress = True
                    yield stage, action

    def next_action(self, stage: int) -> Action | None:
        """What `stage` does next; None when it has done everything."""
        actions, index = self._schedule.actions[stage], self._next_index[stage]
        return actions[index] if index < len(actions) else None

    def advance(self, stage: int) -> Action | None:
        """Do the next action of `stage`; None if it has none, or one that must wait."""
        action = self.next_action(stage)
        if action is None:
            return None
        needs = self._needs(stage, action)
        if any(need not in self._done for need in needs):
            return None
        start = max([self.clock[stage], *(self._done[need] for need in needs)])
        self.clock[stage] = start + self._costs[action.kind]
        position = self._schedule.position(stage, action.chunk)
        for part in _PARTS[action.kind]:
            self._done[position, action.micro_batch, part] = self.clock[stage]
        self._next_index[stage] += 1
        return action

    def _needs(self, stage: int, action: Action) -> list[_Node]:
        position, micro_batch = self._schedule.position(stage, action.chunk), action.micro_batch
        match action.kind:
            case ActionKind.FORWARD:
                return [(position - 1, micro_batch, "forward")] if position > 0 else []
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                own: list[_Node] = [(position, micro_batch, "forward")]
                is_last = position == self._schedule.last_position
                return own if is_last else [*own, (position + 1, micro_batch, "input")]
            case ActionKind.BACKWARD_WEIGHT:
                return [(position, micro_batch, "input")]
