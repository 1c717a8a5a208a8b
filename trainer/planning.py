"""What a rank should need by the plan, to be shown beside what it measures. Imports no torch."""

from __future__ import annotations

from outlast.blackbox import Expected
from outlast.sizing.of_spec import plan_input
from outlast.spec import JobSpec
from trainer.core.memory import rank_memory
from trainer.core.timing import bubble


def expected_of(spec: JobSpec, stage: int, *, on_gpu: bool) -> Expected:
    """What a rank of `stage` should need, to be held beside what it measures."""
    facts = plan_input(spec, on_gpu=on_gpu)
    return Expected(memory_bytes=rank_memory(facts, stage).device_bytes, bubble=bubble(facts))
