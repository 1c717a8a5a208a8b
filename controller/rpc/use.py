"""What a step of a job uses, put together from what each of its ranks says. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from outlast import blackbox
from outlast.v1 import agents_pb2, common_pb2, jobs_pb2


def step_use(summaries: Iterable[agents_pb2.RankSummary]) -> jobs_pb2.StepUse | None:
    """Of the last steps; None before any rank has said something of one."""
    uses = [summary.use for summary in summaries if summary.HasField("use")]
    if not uses:
        return None
    pipeline = zip(_each("pipeline_busy_s", uses), _each("pipeline_waited_s", uses), strict=True)
    return jobs_pb2.StepUse(
        split=_mean([use.split for use in uses]),
        bubble=blackbox.bubble_of(list(pipeline)) or 0.0,
        expected_bubble=max(_each("expected_bubble", uses)),
        peak_memory_bytes=max(_each("peak_memory_bytes", uses)),
        expected_memory_bytes=max(_each("expected_memory_bytes", uses)),
    )


def _mean(splits: list[common_pb2.StepSplit]) -> common_pb2.StepSplit:
    names = common_pb2.StepSplit.DESCRIPTOR.fields_by_name
    sums = {name: sum(_each(name, splits)) for name in names}
    return common_pb2.StepSplit(**{name: whole / len(splits) for name, whole in sums.items()})


def _each(name: str, messages: Sequence[Any]) -> Iterable[Any]:
    """Of thousands of messages, in the controller's loop: no line of ours runs for each."""
    return map(attrgetter(name), messages)
