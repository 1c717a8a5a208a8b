"""The proof that a schedule runs, and what it costs.

`check` runs a schedule on paper: it proves that every action happens once and
in an order that its dependencies allow on all stages together (no deadlock),
and measures the bubble and the activations alive at a time.

Split backwards come from Zero Bubble (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.core.schedule.actions import Action, ActionKind, Schedule
from trainer.core.schedule.replay import DEFAULT_COSTS, Replay, ScheduleError


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What `check` measured.

    `bubble` is the share of all stages' time spent waiting; `peak_in_flight[s]`
    the most micro-batch chunks whose activations stage `s` holds at once, `peak_whole[s]` the most
    that it holds all of: after its input gradients a split backward keeps what weights need.
    """

    makespan: float
    bubble: float
    peak_in_flight: tuple[int, ...]
    peak_whole: tuple[int, ...]


def check(schedule: Schedule, costs: Mapping[ActionKind, float] = DEFAULT_COSTS) -> Timing:
    """Prove `schedule` and measure it.

    Raises:
        ScheduleError: work is missing, repeated, out of order or deadlocked.
    """
    _check_complete(schedule)
    makespan = _makespan(schedule, costs)
    busy = sum(costs[action.kind] for actions in schedule.actions for action in actions)
    return Timing(
        makespan=makespan,
        bubble=1.0 - busy / (makespan * schedule.num_stages),
        peak_in_flight=tuple(_peak(actions, _LAST_PARTS) for actions in schedule.actions),
        peak_whole=tuple(_peak(actions, _FIRST_PARTS) for actions in schedule.actions),
    )


def _makespan(schedule: Schedule, costs: Mapping[ActionKind, float]) -> float:
    replay = Replay(schedule, costs)
    for _ in replay.run():
        pass
    for stage in range(schedule.num_stages):
        stuck = replay.next_action(stage)
        if stuck is not None:
            raise ScheduleError(
                f"schedule {schedule.name}: stage {stage} waits for ever at {stuck.kind} of "
                f"micro-batch {stuck.micro_batch}, chunk {stuck.chunk}"
            )
    return max(replay.clock)


def _check_complete(schedule: Schedule) -> None:
    if len(schedule.actions) != schedule.num_stages:
        raise ScheduleError(
            f"schedule {schedule.name}: {len(schedule.actions)} stages have work, "
            f"expected {schedule.num_stages}"
        )
    for stage, actions in enumerate(schedule.actions):
        if len(set(actions)) != len(actions):
            raise ScheduleError(f"schedule {schedule.name}: stage {stage} repeats an action")
        _check_whole_work(schedule, stage, actions)


def _check_whole_work(schedule: Schedule, stage: int, actions: tuple[Action, ...]) -> None:
    done: dict[tuple[int, int], set[ActionKind]] = {}
    for action in actions:
        done.setdefault((action.micro_batch, action.chunk), set()).add(action.kind)
    expected = {
        (micro_batch, chunk)
        for micro_batch in range(schedule.num_micro_batches)
        for chunk in range(schedule.num_chunks)
    }
    for micro_batch, chunk in sorted(expected):
        kinds = done.get((micro_batch, chunk), set())
        if kinds not in _WHOLE_WORK:
            raise ScheduleError(
                f"schedule {schedule.name}: stage {stage} does "
                f"{sorted(kinds) or 'nothing'} for micro-batch {micro_batch} of "
                f"chunk {chunk}; expected a forward and one whole backward"
            )
    if done.keys() - expected:
        raise ScheduleError(
            f"schedule {schedule.name}: stage {stage} works on a micro-batch or chunk "
            f"outside {schedule.num_micro_batches} x {schedule.num_chunks}"
        )


_WHOLE_WORK = (
    {ActionKind.FORWARD, ActionKind.BACKWARD},
    {ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT},
)


# A backward's part after which nothing of a micro-batch is kept, and after which not all of it.
_LAST_PARTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
_FIRST_PARTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)


def _peak(actions: tuple[Action, ...], ends: tuple[ActionKind, ...]) -> int:
    """The most micro-batch chunks at once that are between their forward and one of `ends`."""
    alive = peak = 0
    for action in actions:
        alive += (action.kind is ActionKind.FORWARD) - (action.kind in ends)
        peak = max(peak, alive)
    return peak
