"""The engine does what the schedule says, whatever becomes of its messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outlast.blackbox import Op
from outlast.layout import Layout
from tests.trainer.jobs_pipeline import (
    FACTOR,
    SHAPE,
    batches,
    connect,
    messages_noted,
    numbers_sent,
    overtaken,
    run_reluctantly,
    run_stand_ins,
)
from tests.trainer.ranks import RankPool
from trainer.core.schedule import ActionKind, Schedule, build, forward_only


def expected_loss(num_micro_batches: int, num_positions: int) -> float:
    """What the stand-ins compute: tokens times targets, times FACTOR on every chunk."""
    total = sum(int((b.tokens * b.targets).sum()) for b in batches(num_micro_batches))
    return FACTOR**num_positions * total


@pytest.mark.parametrize(
    "schedule",
    [
        build("gpipe", 2, 3),
        build("1f1b", 3, 2),
        build("1f1b", 2, 5, extra_warmup=1),
        build("interleaved", 2, 5, num_chunks=2),
        build("interleaved", 3, 2, num_chunks=2),
        build("zb-h1", 3, 5),
        build("zb-v", 2, 6, num_chunks=2),
        build("zb-v", 3, 2, num_chunks=2),
    ],
    ids=lambda schedule: f"{schedule.name}-{schedule.num_stages}-{schedule.num_micro_batches}",
)
def test_a_step_computes_what_one_process_would(ranks: RankPool, schedule: Schedule) -> None:
    found = ranks.run_once(run_stand_ins, schedule.num_stages, *_job(schedule))
    loss = expected_loss(schedule.num_micro_batches, schedule.last_position + 1)
    ends, _ = schedule.chunk_at(schedule.last_position)
    assert [result["loss"] for result in found] == [
        loss * (stage == ends) for stage in range(schedule.num_stages)
    ]
    # Every factor has a like part in the loss.
    for result in found:
        assert result["grads"] == [pytest.approx(loss / FACTOR)] * schedule.num_chunks


def test_hooks_surround_every_use_of_a_chunk_in_the_order_of_the_schedule(
    ranks: RankPool,
) -> None:
    schedule = build("interleaved", 2, 5, num_chunks=2)
    for stage, result in enumerate(ranks.run_once(run_stand_ins, 2, *_job(schedule))):
        assert result["order"] == schedule.actions[stage]
        expected = []
        for action in schedule.actions[stage]:
            last = action.kind is ActionKind.BACKWARD and action.micro_batch == 4
            kind = action.kind.value
            for moment in (f"before {kind}", f"after {'last ' if last else ''}{kind}"):
                expected.append((moment, action.chunk, action.micro_batch))
        assert result["calls"] == expected
        assert result["begun"] == [[(7, number) for number in range(5)]] * 2
        assert result["training"] == [True, True]


def test_hooks_hear_of_both_parts_of_a_split_backward(ranks: RankPool) -> None:
    names = {
        ActionKind.FORWARD: ("before forward", "after forward"),
        ActionKind.BACKWARD_INPUT: ("before backward", "after inputs"),
        ActionKind.BACKWARD_WEIGHT: ("before weights", "after weights"),
    }
    schedule = build("zb-h1", 2, 4)
    for stage, result in enumerate(ranks.run_once(run_stand_ins, 2, *_job(schedule))):
        expected = [
            (moment, 0, action.micro_batch)
            for action in schedule.actions[stage]
            for moment in names[action.kind]
        ]
        last = expected.index(("after inputs", 0, 3))
        expected[last] = ("after last inputs", 0, 3)
        assert result["calls"] == expected


def test_each_message_is_noted_by_both_of_its_ends(ranks: RankPool, tmp_path: Path) -> None:
    schedule = build("interleaved", 3, 4, num_chunks=2)
    found = ranks.run_once(messages_noted, 3, tmp_path, schedule)
    sent = [
        (stage, each.peer, each.message, each.detail)
        for stage, noted in enumerate(found)
        for each in noted
        if each.op is Op.SEND
    ]
    received = [
        (each.peer, stage, each.message, each.detail)
        for stage, noted in enumerate(found)
        for each in noted
        if each.op is Op.RECV
    ]
    assert len(set(sent)) == len(sent) > 0
    assert sorted(sent) == sorted(received)
    for each in (each for noted in found for each in noted):
        # A receive does not know when its message left.
        assert (0 < each.departed_ns <= each.start_ns) == (each.op is Op.SEND)


def test_a_chunk_hears_the_number_of_its_micro_batch_in_the_global_batch(
    ranks: RankPool,
) -> None:
    """Replica 1 has the second half of the global batch."""
    found = ranks.run(run_stand_ins, 2, Layout(dp=2), build("1f1b", 1, 3), 0.0)
    assert [result["begun"] for result in found] == [
        [[(7, 0), (7, 1), (7, 2)]],
        [[(7, 3), (7, 4), (7, 5)]],
    ]


def test_evaluation_is_no_training_and_a_sender_waits_for_buffers(ranks: RankPool) -> None:
    """Sixteen micro-batches, and buffers for four: nothing else holds stage 0 back."""
    schedule = forward_only(2, 16, num_chunks=2)
    found = ranks.run(run_stand_ins, 2, Layout(pp=2), schedule, 0.0)
    assert [result["loss"] for result in found] == [0.0, expected_loss(16, 4)]
    for result in found:
        assert (result["grads"], result["training"]) == ([], [False, False])


def test_messages_that_overtake_others_are_told_apart(ranks: RankPool) -> None:
    """With two stages of two chunks the next stage is the previous one too.

    The control has no tags: it takes one message for another and never notices.
    """
    right = ranks.run(overtaken, 2, True)
    loss = expected_loss(4, 4)
    assert [found for found, _ in right] == [0.0, loss]
    assert [grads for _, grads in right] == [[pytest.approx(loss / FACTOR)] * 2] * 2
    crossed = ranks.run(overtaken, 2, False)
    assert crossed[1][0] != loss


@pytest.mark.parametrize("most_receives", [1, 2])
@pytest.mark.parametrize(
    "schedule",
    [
        build("gpipe", 3, 6),
        build("1f1b", 4, 9, extra_warmup=1),
        build("interleaved", 2, 7, num_chunks=3),
        build("interleaved", 4, 8, num_chunks=2),
        build("zb-h1", 4, 9),
        build("zb-v", 2, 9, num_chunks=2),
        build("zb-v", 4, 9, num_chunks=2),
        forward_only(2, 24, num_chunks=3),
        forward_only(4, 24, num_chunks=2),
        forward_only(3, 24, num_chunks=2, folds=True),
    ],
    ids=lambda schedule: f"{schedule.name}-{schedule.num_stages}-{schedule.num_micro_batches}",
)
def test_a_step_ends_with_few_receives_posted(
    ranks: RankPool, schedule: Schedule, most_receives: int
) -> None:
    """A gloo send ends when its receive is posted: who waited for the other would hang here."""
    found = ranks.run(run_reluctantly, schedule.num_stages, schedule, most_receives)
    loss = expected_loss(schedule.num_micro_batches, schedule.last_position + 1)
    ends, _ = schedule.chunk_at(schedule.last_position)
    assert [result for result, _ in found] == [
        2 * loss * (stage == ends) for stage in range(schedule.num_stages)
    ]
    # What is needed before others of the same sender is posted in any case.
    assert max(largest for _, largest in found) <= most_receives + 1


def test_stages_can_connect_one_link_after_the_other(ranks: RankPool) -> None:
    """As on NCCL, where the first message between two ranks blocks both."""
    ranks.run(connect, 4, build("interleaved", 4, 4, num_chunks=2))
    ranks.run(connect, 4, build("zb-v", 4, 4, num_chunks=2))


def test_replicas_of_a_boundary_send_one_part_each(ranks: RankPool) -> None:
    whole, parts = (ranks.run(numbers_sent, 4, replicated) for replicated in (False, True))
    assert [loss for loss, _ in parts] == [loss for loss, _ in whole]
    # Both ways between the stages, three micro-batches.
    each = 3 * SHAPE[0] * SHAPE[1]
    assert [sent for _, sent in whole] == [each] * 4
    assert [sent for _, sent in parts] == [each // 2] * 4


def test_a_step_tells_how_long_it_computed(ranks: RankPool) -> None:
    """A forward waits 1 ms, a backward 2: no clock may find less."""
    schedule = build("interleaved", 2, 4, num_chunks=2)
    for result in ranks.run(run_stand_ins, 2, Layout(pp=2), schedule, 0.001):
        busy_s, waited_s, elapsed_s = result["times_s"]
        assert busy_s >= 4 * 2 * 0.003
        assert waited_s >= 0
        assert busy_s + waited_s <= elapsed_s


def test_messages_are_under_way_while_a_stage_computes(ranks: RankPool) -> None:
    schedule = build("1f1b", 2, 4)
    for result in ranks.run(run_stand_ins, 2, Layout(pp=2), schedule, 0.001):
        under_way_s, waited_s = result["messages_s"]
        assert under_way_s > waited_s


def _job(schedule: Schedule) -> tuple[Any, ...]:
    return Layout(pp=schedule.num_stages), schedule, 0.0
