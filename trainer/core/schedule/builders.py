"""The schedules that we have.

Each is an order of forwards, an order of backwards and a warm-up: so many
forwards come first, then a stage alternates, then it drains.

Interleaving cuts the micro-batches into rounds; a stage takes a round through
its first chunk, then through its next. A round is as long as the pipeline
where that divides the micro-batches; else rounds are longer by a little and
differ by one at most, or there is one short round. Where torch or Megatron-LM
accept the numbers, this is their order.

Sources: GPipe (arXiv 1811.06965), 1F1B from PipeDream-Flush (arXiv 2006.09503),
interleaved 1F1B from Narayanan et al. (arXiv 2104.04473, 2.2), ZB-H1 and ZB-V from Zero Bubble
Pipeline Parallelism (arXiv 2401.10241, 2.3 and 6).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainer.core.schedule.actions import Action, ActionKind, Schedule

NAMES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
_CHUNKS_OF_V = 2


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
    if name == "zb-v":
        if num_chunks != _CHUNKS_OF_V:
            raise ValueError(f"schedule zb-v runs 2 chunks per stage, not {num_chunks}")
        return zero_bubble_v(num_stages, num_micro_batches)
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


def zero_bubble_v(num_stages: int, num_micro_batches: int) -> Schedule:
    """ZB-V: two chunks a stage, of which the second ones go from the last stage to the first.

    A micro-batch comes back to the stage that it began on, so that this one begins to go backwards
    as soon as its first forward has been through, and no later than any other. From there on it
    does as many forwards as backwards, and puts weights' gradients off only at the end. So every
    stage has `p` micro-batches in hand at most, as 1F1B's first one, two chunks of them one.
    """
    # Fewer micro-batches do what is theirs of the order of as many as fill the pipeline.
    enough = max(num_micro_batches, 2 * num_stages)
    return Schedule(
        name="zb-v",
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_chunks=_CHUNKS_OF_V,
        folds=True,
        actions=tuple(
            tuple(
                action
                for action in _v_order(num_stages, stage, enough)
                if action.micro_batch < num_micro_batches
            )
            for stage in range(num_stages)
        ),
    )


def forward_only(
    num_stages: int, num_micro_batches: int, *, num_chunks: int = 1, folds: bool = False
) -> Schedule:
    """Evaluation: no backward at all. `check` does not apply to it."""
    rounds = _rounds(num_stages, num_micro_batches)
    return Schedule(
        name="forward_only",
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        num_chunks=num_chunks,
        folds=folds,
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


def _v_order(num_stages: int, stage: int, num_micro_batches: int) -> Iterator[Action]:
    """What a stage of ZB-V does, of two rounds of the pipeline at least."""
    forward, inputs, weights = (
        ActionKind.FORWARD,
        ActionKind.BACKWARD_INPUT,
        ActionKind.BACKWARD_WEIGHT,
    )
    behind = num_stages - stage
    done: Counter[tuple[ActionKind, int]] = Counter()

    def work(*kinds: ActionKind, chunk: int) -> Iterator[Action]:
        for kind in kinds:
            number = done[kind, chunk]
            if number < num_micro_batches:
                done[kind, chunk] += 1
                yield Action(kind=kind, micro_batch=number, chunk=chunk)

    # Until the first micro-batch comes back.
    for _ in range(2 * behind - 1):
        yield from work(forward, chunk=0)
    for _ in range(stage):
        yield from work(forward, chunk=1)
        yield from work(forward, chunk=0)
    # Until gradients come back, too.
    for _ in range(behind):
        yield from work(forward, inputs, weights, chunk=1)
    while done[forward, 1] < num_micro_batches:
        yield from work(forward, inputs, weights, chunk=0)
        yield from work(forward, inputs, weights, chunk=1)
    # Nothing comes behind these: stages that wait for them come first, weights after.
    for _ in range(stage):
        yield from work(inputs, chunk=0)
        yield from work(inputs, chunk=1)
    for _ in range(behind):
        yield from work(inputs, weights, chunk=0)
    for chunk in (1, 0):
        yield from work(*(weights,) * num_micro_batches, chunk=chunk)


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
