"""Where the time of a rank's last steps went, from the totals in its black box."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outlast.blackbox import Expected, Group, Phase, Reader, StepUse, TimeUse
from outlast.v1 import agents_pb2, common_pb2

# What a step is made of; checkpoints and evaluation come beside it.
_STEP_PHASES = (Phase.DATA, Phase.FORWARD_BACKWARD, Phase.GRADIENT_SYNC, Phase.OPTIMIZER)
_REPLICAS = (Group.DP, Group.EXPERT_DP)
_OWN_GROUPS = (Group.TP, Group.PP, *_REPLICAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """What a box said at one look."""

    step: int
    time_use: TimeUse
    step_use: StepUse


@dataclass(slots=True)
class LastSteps:
    """Remembers a rank's totals from look to look, and tells what came in between."""

    _before: _Totals | None = None
    _use: agents_pb2.RankUse | None = None

    @property
    def use(self) -> agents_pb2.RankUse | None:
        """Of the steps between the last two looks that found new ones; None before the first."""
        return self._use

    def look(self, reader: Reader) -> None:
        """Take in what has been completed since the last look."""
        present = reader.present()
        now = _Totals(
            step=present.completed_step, time_use=reader.time_use(), step_use=reader.step_use()
        )
        first = present.resumed_step if self._before is None else self._before.step
        if now.step < first:
            # What was read before was not true, or the box is another's now.
            self._before = now
        if now.step > first:
            self._use = _rank_use(self._before, now, now.step - first, reader.expected())
            self._before = now


def mean_split(splits: Sequence[common_pb2.StepSplit]) -> common_pb2.StepSplit | None:
    """Of several ranks; None of none."""
    if not splits:
        return None
    names = common_pb2.StepSplit.DESCRIPTOR.fields_by_name
    means = {name: sum(getattr(each, name) for each in splits) / len(splits) for name in names}
    return common_pb2.StepSplit(**means)


def _rank_use(
    then: _Totals | None, now: _Totals, num_steps: int, expected: Expected | None
) -> agents_pb2.RankUse:
    use, before = now.step_use, StepUse() if then is None else then.step_use
    per_step = 1e-9 / num_steps
    split = _split(None if then is None else then.time_use, now.time_use, num_steps)
    split.forward_s = max(0, use.forward_ns - before.forward_ns) * per_step
    split.backward_s = max(0, use.backward_ns - before.backward_ns) * per_step
    split.data_wait_s = max(0, use.data_wait_ns - before.data_wait_ns) * per_step
    return agents_pb2.RankUse(
        split=split,
        pipeline_busy_s=max(0, use.busy_ns - before.busy_ns) * per_step,
        pipeline_waited_s=max(0, use.waited_ns - before.waited_ns) * per_step,
        peak_memory_bytes=use.peak_memory_bytes,
        expected_memory_bytes=0 if expected is None else expected.memory_bytes,
        expected_bubble=0.0 if expected is None else expected.bubble,
    )


def _split(then: TimeUse | None, now: TimeUse, num_steps: int) -> common_pb2.StepSplit:
    """All but the passes and the wait for data, which the rank itself times."""
    before = TimeUse(phases_s={}, operations_s={}) if then is None else then

    def waited_s(phases: Iterable[Phase], groups: Iterable[Group]) -> float:
        keys = [(phase, group) for phase in phases for group in groups]
        of_now = sum(now.operations_s.get(key, 0.0) for key in keys)
        return max(0.0, of_now - sum(before.operations_s.get(key, 0.0) for key in keys))

    def own_s(phase: Phase) -> float:
        whole_s = now.phases_s.get(phase, 0.0) - before.phases_s.get(phase, 0.0)
        return max(0.0, whole_s - waited_s((phase,), Group))

    others = [group for group in Group if group not in _OWN_GROUPS]
    return common_pb2.StepSplit(
        data_s=own_s(Phase.DATA) / num_steps,
        optimizer_s=own_s(Phase.OPTIMIZER) / num_steps,
        tp_exposed_s=waited_s(_STEP_PHASES, (Group.TP,)) / num_steps,
        pp_exposed_s=waited_s(_STEP_PHASES, (Group.PP,)) / num_steps,
        dp_exposed_s=waited_s(_STEP_PHASES, _REPLICAS) / num_steps,
        garbage_collection_s=own_s(Phase.GARBAGE_COLLECTION) / num_steps,
        other_exposed_s=waited_s(_STEP_PHASES, others) / num_steps,
    )
