"""How many receive buffers each stage of a pipeline needs, for a plan.

What a schedule really needs is found by running it on paper
(`trainer.core.schedule.messages.num_buffers`), which takes longer the deeper the
pipeline is. Plain schedules follow a formula. Interleaved ones grow in proportion to
the stages, and by a constant for every second chunk, so large ones are scaled from a
small one. A test holds both beside what is run on paper.
"""

from __future__ import annotations

from functools import lru_cache

from trainer.core.schedule import build, forward_only
from trainer.core.schedule.messages import num_buffers

# Stages, times chunks, that are run on paper; deeper pipelines are scaled.
_MAX_POSITIONS = 64
_SCALED_STAGES = 8
# The longest warm-up of a schedule, and as much again.
_STEADY_ROUNDS = 4


def receive_buffers(
    name: str, stages: int, micro_batches: int, chunks: int, extra_warmup: int
) -> tuple[int, ...]:
    """Buffers of training and of evaluation together, by stage."""
    if stages == 1:
        return (0,)
    if name == "interleaved":
        return _interleaved(stages, min(micro_batches, _STEADY_ROUNDS * stages), chunks)
    if name == "zb-v":
        return tuple(_folded(stages, micro_batches, stage) for stage in range(stages))
    last = stages - 1
    return tuple(
        (_forwards(name, stages, micro_batches, extra_warmup, stage) if stage > 0 else 0)
        + (_backwards(name, stages, micro_batches, extra_warmup, stage) if stage < last else 0)
        # Nothing holds an evaluation back but two rounds of buffers.
        + (min(micro_batches, 2 * stages) if stage > 0 else 0)
        for stage in range(stages)
    )


def _forwards(name: str, stages: int, micro_batches: int, extra: int, stage: int) -> int:
    """The stage before runs ahead by its warm-up and one more."""
    if name == "gpipe":
        return micro_batches
    if name == "zb-h1":
        # All stages hold as many until their weights' gradients, and the one before is one further.
        return min(micro_batches, stages + 2)
    return min(micro_batches, stages - stage + 1 + extra)


def _backwards(name: str, stages: int, micro_batches: int, extra: int, stage: int) -> int:
    """Gradients come back for as many forwards as the stage may have sent."""
    if name == "gpipe":
        return micro_batches
    return min(micro_batches, stages if name == "zb-h1" else stages - stage + extra)


def _folded(stages: int, micro_batches: int, stage: int) -> int:
    """Of ZB-V; the first stage receives no first outputs, the last hands these on to itself."""
    # An evaluation takes a round through one chunk before the next.
    a_round = -(-micro_batches // max(1, micro_batches // stages))
    # Micro-batches beyond those that fill half of the way, up to all of it.
    more = min(micro_batches - stages, stages)
    from_before: tuple[int, ...] = ()
    from_behind: tuple[int, ...] = ()
    if stage > 0:
        back = min(stage + 1, stages - stage + 1, 2 - more)
        from_before = (2 * stages + 1 - stage, max(2, back, stage + more - stages), a_round)
    if stage < stages - 1:
        from_behind = (stage + 3, max(stages - stage, more), a_round)
    return sum(min(micro_batches, most) for most in (*from_before, *from_behind))


@lru_cache(maxsize=32)
def _interleaved(stages: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
    if stages * chunks <= _MAX_POSITIONS:
        return _on_paper(stages, micro_batches, chunks)
    small = min(stages, _SCALED_STAGES)
    few = max(1, micro_batches * small // stages)
    # Chunks come in pairs: what one more adds alternates.
    first = 2 + chunks % 2
    base, more = _on_paper(small, few, first), _on_paper(small, few, first + 2)
    pairs = (chunks - first) // 2
    scaled = [low + pairs * (high - low) for low, high in zip(base, more, strict=True)]
    # The first stage receives no outputs, so it is like no other.
    share = (small - 2) / max(1, stages - 2)
    places = [0, *(1 + round(stage * share) for stage in range(stages - 1))]
    return tuple(-(-scaled[place] * stages // small) for place in places)


@lru_cache(maxsize=32)
def _on_paper(stages: int, micro_batches: int, chunks: int) -> tuple[int, ...]:
    training = build("interleaved", stages, micro_batches, num_chunks=chunks)
    evaluation = forward_only(stages, micro_batches, num_chunks=chunks)
    both = [num_buffers(each, range(stages)) for each in (training, evaluation)]
    return tuple(sum(sum(channels[stage].values()) for channels in both) for stage in range(stages))
