"""Pipeline schedules as pure data, and the validator that proves them.

A schedule is, for every stage, the order of its actions: forward, and backward
either fused or split into input-gradient and weight-gradient parts (the parts
that zero-bubble schedules need). A stage may hold several model chunks; chunk
`c` of stage `s` stands at position `c * num_stages + s` of the model.

`check` runs a schedule on paper: it proves that every action happens once and
in an order that its dependencies allow on all stages together (no deadlock),
and measures what it costs: the bubble and the activations alive at a time.

Sources: GPipe (arXiv 1811.06965), 1F1B from PipeDream-Flush (arXiv 2006.09503),
split backwards from Zero Bubble (arXiv 2401.10241).

Sending and receiving do not belong here: they follow from the positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


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
    """The order of work of every stage; `actions[stage]` runs first to last."""

    name: str
    num_stages: int
    num_micro_batches: int
    num_chunks: int = 1
    actions: tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What `check` measured.

    `bubble` is the share of all stages' time spent waiting; `peak_in_flight[s]`
    the most micro-batch chunks whose activations stage `s` holds at once.
    """

    makespan: float
    bubble: float
    peak_in_flight: tuple[int, ...]


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


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards: simple, and every activation stays alive."""
    work = _forwards(range(num_micro_batches)) + _backwards(range(num_micro_batches))
    return Schedule(
        name="gpipe",
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        actions=(work,) * num_stages,
    )


def one_forward_one_backward(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B: after its warm-up a stage alternates, so it holds at most its depth in flight."""
    return Schedule(
        name="1f1b",
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        actions=tuple(
            _alternating(min(num_micro_batches, num_stages - stage - 1), num_micro_batches)
            for stage in range(num_stages)
        ),
    )


def forward_only(num_stages: int, num_micro_batches: int) -> Schedule:
    """Evaluation: no backward at all. `check` does not apply to it."""
    return Schedule(
        name="forward_only",
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        actions=(_forwards(range(num_micro_batches)),) * num_stages,
    )


BUILDERS: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_forward_one_backward}
)


def build(name: str, num_stages: int, num_micro_batches: int) -> Schedule:
    """The schedule called `name`; raises ValueError for a name we do not have."""
    builder = BUILDERS.get(name)
    if builder is None:
        raise ValueError(f"schedule {name!r} is not one of {', '.join(sorted(BUILDERS))}")
    return builder(num_stages, num_micro_batches)


def check(schedule: Schedule, costs: Mapping[ActionKind, float] = DEFAULT_COSTS) -> Timing:
    """Prove `schedule` and measure it.

    Raises:
        ScheduleError: work is missing, repeated, out of order or deadlocked.
    """
    _check_complete(schedule)
    ends = _simulate(schedule, costs)
    makespan = max(ends.values())
    busy = sum(costs[action.kind] for actions in schedule.actions for action in actions)
    return Timing(
        makespan=makespan,
        bubble=1.0 - busy / (makespan * schedule.num_stages),
        peak_in_flight=tuple(_peak_in_flight(actions) for actions in schedule.actions),
    )


def _forwards(micro_batches: range) -> tuple[Action, ...]:
    return tuple(Action(kind=ActionKind.FORWARD, micro_batch=m) for m in micro_batches)


def _backwards(micro_batches: range) -> tuple[Action, ...]:
    return tuple(Action(kind=ActionKind.BACKWARD, micro_batch=m) for m in micro_batches)


def _alternating(num_warmup: int, num_micro_batches: int) -> tuple[Action, ...]:
    work = list(_forwards(range(num_warmup)))
    for index in range(num_micro_batches - num_warmup):
        work += _forwards(range(num_warmup + index, num_warmup + index + 1))
        work += _backwards(range(index, index + 1))
    work += _backwards(range(num_micro_batches - num_warmup, num_micro_batches))
    return tuple(work)


def _check_complete(schedule: Schedule) -> None:
    if len(schedule.actions) != schedule.num_stages:
        raise ScheduleError(
            f"schedule {schedule.name}: {len(schedule.actions)} stages have work, "
            f"expected {schedule.num_stages}"
        )
    for stage, actions in enumerate(schedule.actions):
        if len(set(actions)) != len(actions):
            raise ScheduleError(f"schedule {schedule.name}: stage {stage} repeats an action")
        for micro_batch in range(schedule.num_micro_batches):
            for chunk in range(schedule.num_chunks):
                done = {a.kind for a in actions if (a.micro_batch, a.chunk) == (micro_batch, chunk)}
                if done not in _WHOLE_WORK:
                    raise ScheduleError(
                        f"schedule {schedule.name}: stage {stage} does "
                        f"{sorted(done) or 'nothing'} for micro-batch {micro_batch} of "
                        f"chunk {chunk}; expected a forward and one whole backward"
                    )
        whole = schedule.num_micro_batches * schedule.num_chunks
        if sum(action.kind is ActionKind.FORWARD for action in actions) != whole:
            raise ScheduleError(
                f"schedule {schedule.name}: stage {stage} works on a micro-batch or chunk "
                f"outside {schedule.num_micro_batches} x {schedule.num_chunks}"
            )


_WHOLE_WORK = (
    {ActionKind.FORWARD, ActionKind.BACKWARD},
    {ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT},
)

# (position in the model, micro-batch, "forward" | "input" | "weight")
_Node = tuple[int, int, str]


def _simulate(
    schedule: Schedule, costs: Mapping[ActionKind, float]
) -> dict[tuple[int, Action], float]:
    """When each (stage, action) ends if every stage works as early as it may."""
    done: dict[_Node, float] = {}
    ends: dict[tuple[int, Action], float] = {}
    clock = [0.0] * schedule.num_stages
    next_index = [0] * schedule.num_stages
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(schedule.actions):
            while next_index[stage] < len(actions):
                action = actions[next_index[stage]]
                needs = _dependencies(schedule, stage, action)
                if any(need not in done for need in needs):
                    break
                start = max([clock[stage], *(done[need] for need in needs)])
                clock[stage] = ends[stage, action] = start + costs[action.kind]
                position = action.chunk * schedule.num_stages + stage
                for part in _PARTS[action.kind]:
                    done[position, action.micro_batch, part] = clock[stage]
                next_index[stage] += 1
                progress = True
    for stage, actions in enumerate(schedule.actions):
        if next_index[stage] < len(actions):
            stuck = actions[next_index[stage]]
            raise ScheduleError(
                f"schedule {schedule.name}: stage {stage} waits for ever at {stuck.kind} of "
                f"micro-batch {stuck.micro_batch}, chunk {stuck.chunk}"
            )
    return ends


_PARTS: Mapping[ActionKind, tuple[str, ...]] = MappingProxyType(
    {
        ActionKind.FORWARD: ("forward",),
        ActionKind.BACKWARD: ("input", "weight"),
        ActionKind.BACKWARD_INPUT: ("input",),
        ActionKind.BACKWARD_WEIGHT: ("weight",),
    }
)


def _dependencies(schedule: Schedule, stage: int, action: Action) -> list[_Node]:
    position = action.chunk * schedule.num_stages + stage
    last = schedule.num_chunks * schedule.num_stages - 1
    micro_batch = action.micro_batch
    match action.kind:
        case ActionKind.FORWARD:
            return [(position - 1, micro_batch, "forward")] if position > 0 else []
        case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
            own: list[_Node] = [(position, micro_batch, "forward")]
            return own + ([(position + 1, micro_batch, "input")] if position < last else [])
        case ActionKind.BACKWARD_WEIGHT:
            return [(position, micro_batch, "input")]


def _peak_in_flight(actions: tuple[Action, ...]) -> int:
    alive = peak = 0
    for action in actions:
        match action.kind:
            case ActionKind.FORWARD:
                alive += 1
            case ActionKind.BACKWARD | ActionKind.BACKWARD_WEIGHT:
                alive -= 1
            case ActionKind.BACKWARD_INPUT:
                # The weight gradient still needs the activations.
                pass
        peak = max(peak, alive)
    return peak
