"""The schedules that we have.

Each is an order of forwards, an order of backwards and a warm-up: so many
forwards come first, then a stage alternates, then it drains.

Interleaving cuts the micro-batches into rounds; a stage takes a round through
its first chunk, then through its next. A round is as long as the pipeline
where that divides the micro-batches; else rounds are longer by a little and
differ by one at most, or there is one short round. Where torch or Megatron-LM
accept the numbers, this is their order.

Sources: GPipe (arXiv 1811.06965), 1F1B from PipeDream-Flush (arXiv 2006.09503),
interleaved 1F1B from Narayanan et al. (arXiv 2104.04473, 2.2), ZB-H1 from Zero Bubble Pipeline
Parallelism (arXiv 2401.10241, 2.3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainer.core.schedule.actions import Action, ActionKind, Schedule

NAMES = ("1f1b", "gpipe", "interleaved", "zb-h1")


def build(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    *,
    num_chunks: int = 1,
    extra_warmup: int = 0,
) -> Schedule:
    """The schedule called `name`.

    Raises:
        ValueError: there is none, or it cannot have so many stages and chunks.
    """
    if name not in NAMES:
        raise ValueError(f"schedule {name!r} is not one of {', '.join(NAMES)}")
    if name != "1f1b" and extra_warmup:
        raise ValueError(f"schedule {name} takes no extra warm-up; 1f1b does")
    if name == "interleaved":
        return interleaved(num_stages, num_micro_batches, num_chunks=num_chunks)
    if num_chunks != 1:
        raise ValueError(f"schedule {name} runs 1 chunk per stage, not {num_chunks}")
    if name == "gpipe":
        return gpipe(num_stages, num_micro_batches)
    if name == "zb-h1":
        return zero_bubble_h1(num_stages, num_micro_batches)
    return one_forward_one_backward(num_stages, num_micro_batches, extra_warmup=extra_warmup)


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards: simple, and every activation stays alive."""
    return _warmed_up(
        "gpipe", num_stages, num_micro_batches, warmups=(num_micro_batches,) * num_stages
    )


def one_forward_one_backward(
    num_stages: int, num_micro_batches: int, *, extra_warmup: int = 0
) -> Schedule:
    """1F1B: after its warm-up a stage alternates, so it holds at most its depth in flight.

    `extra_warmup` lets all stages but the last go that many forwards further
    ahead: it hides the way of a message over a slow link and costs as many live
    micro-batches.
    """
    last = num_stages - 1
    return _warmed_up(
        "1f1b",
        num_stages,
        num_micro_batches,
        warmups=[last - stage + extra_warmup * (stage < last) for stage in range(num_stages)],
    )


def interleaved(num_stages: int, num_micro_batches: int, *, num_chunks: int) -> Schedule:
    """Interleaved 1F1B: `num_chunks` chunks a stage cut the bubble by that factor.

    Stage `r` starts with 2 (p - r - 1) + (v - 1) p forwards (Megatron-LM): one more
    per hop than 1F1B, so a message over a slow link has some time already.

    Raises:
        ValueError: with one chunk it is 1F1B, and one stage has no neighbour.
    """
    if num_stages < 2 or num_chunks < 2:
        raise ValueError(
            "schedule interleaved needs 2 stages and 2 chunks per stage or more, "
            f"not {num_stages} and {num_chunks}"
        )
    last = num_stages - 1
    before_last = (num_chunks - 1) * len(_rounds(num_stages, num_micro_batches)[0])
    return _warmed_up(
        "interleaved",
        num_stages,
        num_micro_batches,
        num_chunks=num_chunks,
        warmups=[before_last + 2 * (last - stage) for stage in range(num_stages)],
    )


def zero_bubble_h1(num_stages: int, num_micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B that sends input gradients on before it computes those of weights.

    Stage `r` is `r` micro-batches behind with the latter: they fill the time in which a stage far
    down the pipeline has nothing else left. So every stage has `p` micro-batches in hand at most,
    as 1F1B's first one has, and of those no more before their backward than 1F1B.
    """
    plain = one_forward_one_backward(num_stages, num_micro_batches)
    return Schedule(
        name="zb-h1",
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        actions=tuple(
            tuple(_weights_behind(work, behind=stage)) for stage, work in enumerate(plain.actions)
        ),
    )


def forward_only(num_stages: int, num_micro_batches: int, *, num_chunks: int = 1) -> Schedule:
    """Evaluation: no backward at all. `check` does not apply to it."""
    rounds = _rounds(num_stages, num_micro_batches)
    return Schedule(
        name="forward_only",
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_chunks=num_chunks,
        actions=(_order(ActionKind.FORWARD, rounds, range(num_chunks)),) * num_stages,
    )


def _warmed_up(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    *,
    warmups: Sequence[int],
    num_chunks: int = 1,
) -> Schedule:
    """`warmups[stage]` forwards, then forward and backward in turn, then what is left."""
    rounds = _rounds(num_stages, num_micro_batches)
    forwards = _order(ActionKind.FORWARD, rounds, range(num_chunks))
    backwards = _order(ActionKind.BACKWARD, rounds, range(num_chunks)[::-1])
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_chunks=num_chunks,
        actions=tuple(_alternating(forwards, backwards, warmup) for warmup in warmups),
    )


def _weights_behind(work: Sequence[Action], *, behind: int) -> Iterator[Action]:
    """The same work with backwards cut in two, weights' parts so many micro-batches later."""
    late: deque[Action] = deque()
    for action in work:
        if action.kind is ActionKind.FORWARD:
            yield action
            continue
        yield replace(action, kind=ActionKind.BACKWARD_INPUT)
        late.append(replace(action, kind=ActionKind.BACKWARD_WEIGHT))
        if len(late) > behind:
            yield late.popleft()
    yield from late


def _rounds(num_stages: int, num_micro_batches: int) -> tuple[range, ...]:
    """Micro-batches that go through one chunk before the next; longer rounds first."""
    num_rounds = max(1, num_micro_batches // num_stages)
    base, extra = divmod(num_micro_batches, num_rounds)
    starts = [index * base + min(index, extra) for index in range(num_rounds + 1)]
    return tuple(range(starts[index], starts[index + 1]) for index in range(num_rounds))


def _order(kind: ActionKind, rounds: Sequence[range], chunks: range) -> tuple[Action, ...]:
    return tuple(
        Action(kind=kind, micro_batch=micro_batch, chunk=chunk)
        for micro_batches in rounds
        for chunk in chunks
        for micro_batch in micro_batches
    )


def _alternating(
    forwards: tuple[Action, ...], backwards: tuple[Action, ...], num_warmup: int
) -> tuple[Action, ...]:
    work = list(forwards[:num_warmup])
    pairs = forwards[num_warmup:]
    for forward, backward in zip(pairs, backwards, strict=False):
        work += (forward, backward)
    return (*work, *backwards[len(pairs) :])
