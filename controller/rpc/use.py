"""What a step of a job uses, put together from what each of its ranks says. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from outlast import blackbox
from outlast.v1 import agents_pb2, common_pb2, jobs_pb2


def step_use(summaries: Iterable[agents_pb2.RankSummary]) -> jobs_pb2.StepUse | None:
    """Of the last steps; None before any rank has said something of one."""
    uses = [summary.use for summary in summaries if summary.HasField("use")]
    if not uses:
        return None
    pipeline = [
        blackbox.StepUse(
            busy_ns=round(use.pipeline_busy_s * 1e9), waited_ns=round(use.pipeline_waited_s * 1e9)
        )
        for use in uses
    ]
    return jobs_pb2.StepUse(
        split=_mean([use.split for use in uses]),
        bubble=blackbox.bubble_of(pipeline) or 0.0,
        expected_bubble=max(use.expected_bubble for use in uses),
        peak_memory_bytes=max(use.peak_memory_bytes for use in uses),
        expected_memory_bytes=max(use.expected_memory_bytes for use in uses),
    )


def _mean(splits: list[common_pb2.StepSplit]) -> common_pb2.StepSplit:
    names = common_pb2.StepSplit.DESCRIPTOR.fields_by_name
    sums = {name: sum(getattr(split, name) for split in splits) for name in names}
    return common_pb2.StepSplit(**{name: whole / len(splits) for name, whole in sums.items()})
