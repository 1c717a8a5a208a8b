"""Who makes a job stand still.

The stalls are produced by a small model of blocking operations: each rank runs
a pipeline-parallel step, one or more of them are stopped or misordered, and
everybody runs until nobody can go on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.edge.operations import operation_of
from controller.operations import set_operation
from diagnostics.core.describe_ranks import where_all_stand
from diagnostics.core.hang import HangKind, analyse
from diagnostics.core.rank_facts import Groups, RankFacts, facts_of
from outlast.blackbox import Group, Op, Phase, Present, Reader, Writer
from outlast.blackbox.records import Operation
from outlast.layout import Layout
from outlast.v1 import agents_pb2
from tests.diagnostics.spoken import facts_from_words

CUBE = Layout(tp=2, pp=2, dp=2)


@dataclass(frozen=True)
class Call:
    op: Op
    group: Group
    peer: int | None = None


@dataclass
class Rank:
    """A rank of the model: its program, and how far it has come."""

    program: list[Call]
    # Stops before this call, outside of any operation.
    stops_at: int | None = None
    at: int = 0
    inside: bool = False
    seqs: Counter[Group] = field(default_factory=Counter)

    @property
    def current(self) -> Call | None:
        return self.program[self.at] if self.inside else None

    def words(self) -> str:
        last = self.at if self.inside else self.at - 1
        if last < 0:
            return ""
        call = self.program[last]
        where = "in" if self.inside else "after"
        seq = self.seqs[call.group]
        return f"{where} {call.group.name.lower()} {call.op.name.lower()} #{seq}"


def step_program(rank: int, layout: Layout, micro_batches: int = 2) -> list[Call]:
    """One training step: forwards, backwards, gradients, norm."""
    pipeline = layout.group_of("pp", rank)
    stage = pipeline.index(rank)
    before = pipeline[stage - 1] if stage > 0 else None
    after = pipeline[stage + 1] if stage + 1 < len(pipeline) else None
    tensor = Call(Op.ALL_REDUCE, Group.TP)
    calls: list[Call] = []
    for source, target in [(before, after)] * micro_batches + [(after, before)] * micro_batches:
        if source is not None:
            calls.append(Call(Op.RECV, Group.PP, source))
        calls.append(tensor)
        if target is not None:
            calls.append(Call(Op.SEND, Group.PP, target))
    calls.append(Call(Op.REDUCE_SCATTER, Group.DP))
    calls.append(Call(Op.ALL_REDUCE, Group.WORLD))
    return calls


def run_until_stuck(ranks: dict[int, Rank], layout: Layout) -> None:
    moved = True
    while moved:
        moved = False
        for rank in ranks.values():
            ready = rank.at < len(rank.program) and rank.at != rank.stops_at
            if ready and not rank.inside:
                rank.inside = True
                rank.seqs[rank.program[rank.at].group] += 1
                moved = True
        for number in ranks:
            party = complete(number, ranks, layout)
            for member in party:
                ranks[member].at += 1
                ranks[member].inside = False
                moved = True


def complete(number: int, ranks: dict[int, Rank], layout: Layout) -> tuple[int, ...]:
    """The ranks whose operation with `number` is complete; empty when it is not."""
    rank = ranks[number]
    call = rank.current
    if call is None:
        return ()
    if call.peer is not None:
        other = ranks[call.peer].current
        opposite = Op.RECV if call.op is Op.SEND else Op.SEND
        matched = other is not None and other.op is opposite and other.peer == number
        return (number, call.peer) if matched else ()
    members = Groups(layout).of(number)[call.group]
    at_it = [
        member
        for member in members
        if ranks[member].current == call and ranks[member].seqs[call.group] == rank.seqs[call.group]
    ]
    return members if len(at_it) == len(members) else ()


def start(layout: Layout) -> dict[int, Rank]:
    return {rank: Rank(step_program(rank, layout)) for rank in range(layout.world_size)}


def facts(ranks: dict[int, Rank], layout: Layout) -> list[RankFacts]:
    """What heartbeats would say: the last operation only, and no peers."""
    return [
        facts_from_words(
            number, "data" if rank.at == rank.stops_at else "optimizer", rank.words(), layout
        )
        for number, rank in ranks.items()
    ]


def test_model_runs_to_its_end_when_nobody_stops() -> None:
    ranks = start(CUBE)
    run_until_stuck(ranks, CUBE)
    assert all(rank.at == len(rank.program) for rank in ranks.values())
    assert analyse(facts(ranks, CUBE)).kind is HangKind.NOT_WAITING


@st.composite
def stalls(draw: st.DrawFn) -> tuple[Layout, int, int]:
    sizes = st.integers(1, 3)
    layout = Layout(tp=draw(sizes), pp=draw(st.integers(1, 4)), dp=draw(sizes))
    culprit = draw(st.integers(0, layout.world_size - 1))
    length = len(step_program(culprit, layout))
    return layout, culprit, draw(st.integers(0, length - 1))


@given(stalls())
def test_rank_that_stops_outside_of_operations_is_found(
    stall: tuple[Layout, int, int],
) -> None:
    layout, culprit, stops_at = stall
    ranks = start(layout)
    ranks[culprit].stops_at = stops_at
    run_until_stuck(ranks, layout)
    verdict = analyse(facts(ranks, layout))
    if layout.world_size == 1:
        assert verdict.kind is HangKind.NOT_WAITING
        return
    assert verdict.kind is HangKind.BUSY_ELSEWHERE
    assert verdict.culprits == (culprit,)
    assert set(verdict.victims) == set(ranks) - {culprit}
    assert f"rank {culprit} is in no operation (phase data" in verdict.reason


@given(stalls(), st.data())
def test_two_ranks_that_stop_are_the_only_ones_named(
    stall: tuple[Layout, int, int], data: st.DataObject
) -> None:
    layout, first, stops_at = stall
    second = data.draw(st.integers(0, layout.world_size - 1))
    ranks = start(layout)
    ranks[first].stops_at = stops_at
    ranks[second].stops_at = 0
    run_until_stuck(ranks, layout)
    verdict = analyse(facts(ranks, layout))
    assert set(verdict.culprits) <= {first, second}
    if set(ranks) - {first, second}:
        assert verdict.culprits


def test_swapped_groups_on_two_ranks_are_an_order_mismatch() -> None:
    ranks = start(CUBE)
    for number in (0, 5):
        program = ranks[number].program
        tensor = program.index(Call(Op.ALL_REDUCE, Group.TP))
        gradients = program.index(Call(Op.REDUCE_SCATTER, Group.DP))
        program[tensor], program[gradients] = program[gradients], program[tensor]
    run_until_stuck(ranks, CUBE)
    verdict = analyse(facts(ranks, CUBE))
    assert verdict.kind is HangKind.ORDER_MISMATCH
    assert set(verdict.culprits) & {0, 5}
    assert "in a circle" in verdict.reason


def test_two_ranks_that_both_receive_are_an_order_mismatch() -> None:
    layout = Layout(pp=2)
    words = "in pp recv #1"
    verdict = analyse(
        [facts_from_words(rank, "forward_backward", words, layout) for rank in (0, 1)]
    )
    assert (verdict.kind, verdict.culprits) == (HangKind.ORDER_MISMATCH, (0, 1))


def test_different_operations_at_one_place_are_told_apart() -> None:
    layout = Layout(tp=2)
    verdict = analyse(
        [
            facts_from_words(0, "forward_backward", "in tp all_reduce #7", layout),
            facts_from_words(1, "forward_backward", "in tp all_gather #7", layout),
        ]
    )
    assert (verdict.kind, verdict.culprits) == (HangKind.OPERATION_MISMATCH, (0, 1))


def test_group_that_entered_and_does_not_come_out_is_a_transport_fault() -> None:
    # Ranks 0 and 1 are stuck in one tensor-parallel all-reduce; the others have
    # finished theirs and wait for them in the data-parallel group or the pipeline.
    layout = Layout(tp=2, pp=1, dp=2)
    words = {
        0: "in tp all_reduce #9",
        1: "in tp all_reduce #9",
        2: "in dp reduce_scatter #1",
        3: "in dp reduce_scatter #1",
    }
    verdict = analyse(
        [facts_from_words(rank, "gradient_sync", said, layout) for rank, said in words.items()]
    )
    assert (verdict.kind, verdict.culprits) == (HangKind.TRANSPORT, (0, 1))
    assert verdict.victims == (2, 3)


def test_send_and_receive_that_met_are_a_transport_fault() -> None:
    layout = Layout(pp=2)
    verdict = analyse(
        [
            facts_from_words(0, "forward_backward", "in pp send #3", layout),
            facts_from_words(1, "forward_backward", "in pp recv #3", layout),
        ]
    )
    assert (verdict.kind, verdict.culprits) == (HangKind.TRANSPORT, (0, 1))


def test_missing_rank_is_the_root_of_everything() -> None:
    ranks = start(CUBE)
    ranks[5].stops_at = 0
    run_until_stuck(ranks, CUBE)
    verdict = analyse([item for item in facts(ranks, CUBE) if item.rank != 5], missing=[5])
    assert (verdict.kind, verdict.culprits) == (HangKind.MISSING, (5,))


def test_culprits_stand_in_the_order_in_which_they_went_quiet() -> None:
    layout = Layout(dp=3)
    quiet = {1: 200.0, 2: 100.0}
    ranks = [facts_from_words(0, "gradient_sync", "in dp all_reduce #4", layout)]
    ranks += [
        facts_from_words(rank, "data", "after dp all_reduce #3", layout, since_s=since_s)
        for rank, since_s in quiet.items()
    ]
    assert analyse(ranks).culprits == (2, 1)


def test_known_counters_of_other_groups_are_used() -> None:
    # Rank 1 went through the tensor-parallel operation and now computes: whoever
    # still stands in that operation does not wait for rank 1.
    layout = Layout(tp=2, dp=2)
    ranks = [
        facts_from_words(0, "forward_backward", "in tp all_reduce #4", layout),
        RankFacts(
            rank=1,
            phase=Phase.OPTIMIZER,
            op=Op.ALL_REDUCE,
            group=Group.DP,
            seq=1,
            inside=False,
            members=Groups(layout).of(1),
            entered={Group.TP: 4},
        ),
    ]
    assert analyse(ranks).kind is HangKind.TRANSPORT


def test_a_rank_that_has_gone_on_is_no_part_of_a_circle() -> None:
    """Rank 2 stands in the next operation and has left the one in which rank 0 stands."""
    layout = Layout(tp=2, dp=2)
    words = {
        0: ("in dp all_reduce #4", {"tp": 6, "dp": 4}),
        1: ("in tp all_reduce #7", {"tp": 7, "dp": 4}),
        2: ("in dp all_reduce #4", {"tp": 6, "dp": 4}),
        3: ("in tp all_reduce #7", {"tp": 7, "dp": 4}),
    }
    facts = [
        facts_from_words(rank, "gradient_sync", said, layout, entered=entered)
        for rank, (said, entered) in words.items()
    ]
    verdict = analyse(facts)
    assert (verdict.kind, verdict.culprits) == (HangKind.TRANSPORT, (0, 2))
    assert verdict.reason.endswith("the smallest group that they share is dp ranks 0, 2")


def test_a_stopped_rank_is_named_wherever_it_stands() -> None:
    layout = Layout(dp=3)
    words = ["in dp all_reduce #4", "in dp all_reduce #4", "in dp all_reduce #4"]
    facts = [
        facts_from_words(
            rank, "gradient_sync", said, layout, process_state="T" if rank == 1 else "S"
        )
        for rank, said in enumerate(words)
    ]
    verdict = analyse(facts)
    assert (verdict.kind, verdict.culprits) == (HangKind.STOPPED, (1,))
    assert not verdict.is_program_error
    assert where_all_stand(facts) == [
        "rank 1 in dp all_reduce #4 (gradient_sync, stopped)",
        "ranks 0, 2 in dp all_reduce #4 (gradient_sync)",
    ]


def standing(words: dict[int, str], layout: Layout) -> list[RankFacts]:
    return [facts_from_words(rank, "data", said, layout) for rank, said in words.items()]


def test_ranks_that_follow_each_other_are_named_as_one() -> None:
    layout = Layout(dp=20)
    away = (6, 7, 9, 10, 11, 16)
    words = {rank: "after" if rank in away else "in" for rank in range(20)}
    places = where_all_stand(
        standing({rank: f"{word} dp all_reduce #4" for rank, word in words.items()}, layout)
    )
    assert places == [
        "ranks 6, 7, 9-11, 16 after dp all_reduce #4 (data)",
        "ranks 0-5, 8, 12-15, 17-19 in dp all_reduce #4 (data)",
    ]


def test_ranks_in_too_many_pieces_are_counted() -> None:
    layout = Layout(dp=80)
    words = {rank: "in" if rank % 4 else "after" for rank in range(80)}
    (odd, _) = where_all_stand(
        standing({rank: f"{word} dp all_reduce #4" for rank, word in words.items()}, layout)
    )
    shown = ", ".join(str(rank) for rank in range(0, 64, 4))
    assert odd == f"ranks {shown} and 4 more after dp all_reduce #4 (data)"


def test_several_that_are_busy_elsewhere_are_told_with_the_group_that_they_share() -> None:
    """Ranks 4 and 5 never came; they are a tensor-parallel pair."""
    words = dict.fromkeys(range(8), "in world all_reduce #2")
    words |= dict.fromkeys((4, 5), "after tp all_reduce #9")
    verdict = analyse(standing(words, CUBE))
    assert (verdict.kind, verdict.culprits) == (HangKind.BUSY_ELSEWHERE, (4, 5))
    assert verdict.reason.endswith("; the smallest group that they share is tp ranks 4, 5")


def test_ranks_that_share_nothing_smaller_than_the_job_are_told_without_a_group() -> None:
    words = dict.fromkeys(range(8), "in world all_reduce #2")
    words |= dict.fromkeys((0, 7), "after tp all_reduce #9")
    across = analyse(standing(words, CUBE))
    assert across.culprits == (0, 7)
    replicas = dict.fromkeys(range(4), "in dp all_reduce #2")
    replicas |= dict.fromkeys((0, 1), "after dp all_reduce #1")
    flat = analyse(standing(replicas, Layout(dp=4)))
    assert flat.culprits == (0, 1)
    assert "share" not in across.reason + flat.reason


def test_busy_ranks_that_are_not_told_one_by_one_are_named() -> None:
    words = dict.fromkeys(range(8), "in dp all_reduce #2")
    words |= dict.fromkeys(range(6), "after dp all_reduce #1")
    verdict = analyse(standing(words, Layout(dp=8)))
    assert verdict.culprits == (0, 1, 2, 3, 4, 5)
    assert verdict.reason.endswith("ranks 6, 7 wait for it; so it is with ranks 4, 5")


@pytest.mark.parametrize(
    ("missing", "group"),
    [
        ((2, 3), "tp ranks 2, 3"),
        ((0, 2), "dp ranks 0, 2"),
        # A pipeline of two stages, which is the embedding's group as well.
        ((0, 4), "pp ranks 0, 4"),
    ],
)
def test_several_missing_are_told_with_the_group_that_they_share(
    missing: tuple[int, ...], group: str
) -> None:
    layout = Layout(tp=2, dp=2, pp=2)
    assert Groups(layout).of(0)[Group.PP] == (0, 4)
    words = {rank: "in world all_reduce #2" for rank in range(8) if rank not in missing}
    verdict = analyse(standing(words, layout), missing, layout=layout)
    assert (verdict.kind, verdict.culprits) == (HangKind.MISSING, missing)
    assert verdict.reason.endswith(f"; the smallest group that they share is {group}")
    assert "share" not in analyse(standing(words, layout), missing).reason


def test_replicas_that_divide_experts_are_a_group_of_a_hang() -> None:
    layout = Layout(tp=2, dp=4, ep=2)
    groups = Groups(layout).of(3)
    assert (groups[Group.EP], groups[Group.EXPERT_DP]) == ((1, 3), (3, 7))
    words = dict.fromkeys(groups[Group.EP], "in ep all_to_all #5") | {3: "after ep all_to_all #4"}
    verdict = analyse(standing(words, layout), layout=layout)
    assert verdict.culprits == (3,)


def test_ranks_that_divide_sequences_are_a_group_of_a_hang() -> None:
    layout = Layout(tp=2, dp=4, cp=2)
    groups = Groups(layout).of(3)
    assert (groups[Group.CP], groups[Group.DP]) == ((1, 3), (1, 3, 5, 7))
    words = dict.fromkeys(groups[Group.CP], "in cp all_to_all #5") | {3: "after cp all_to_all #4"}
    verdict = analyse(standing(words, layout), layout=layout)
    assert verdict.culprits == (3,)


def test_several_stopped_are_told_with_the_group_that_they_share() -> None:
    facts = [
        facts_from_words(
            rank,
            "data",
            "in world all_reduce #2",
            CUBE,
            process_state="T" if rank in (6, 7) else "S",
        )
        for rank in range(8)
    ]
    verdict = analyse(facts)
    assert (verdict.kind, verdict.culprits) == (HangKind.STOPPED, (6, 7))
    assert verdict.reason.endswith("; the smallest group that they share is tp ranks 6, 7")


def present(tmp_path: Path, *, leave: bool) -> Present:
    writer = Writer(tmp_path / "box", rank=3, world_size=8, attempt=1)
    writer.phase(Phase.GRADIENT_SYNC)
    writer.enter(Op.ALL_REDUCE, Group.TP)
    writer.leave()
    writer.enter(Op.REDUCE_SCATTER, Group.DP)
    if leave:
        writer.leave()
    reader = Reader(tmp_path / "box")
    try:
        return reader.present()
    finally:
        reader.close()
        writer.close()


@pytest.mark.parametrize("leave", [False, True])
def test_an_operation_on_the_wire_is_that_of_the_black_box(tmp_path: Path, leave: bool) -> None:
    now = present(tmp_path, leave=leave)
    summary = agents_pb2.RankSummary()
    set_operation(summary, now.last_operation)
    last = operation_of(summary)
    assert str(last) == str(now.last_operation)
    facts = facts_of(now.rank, now.phase, last, Groups(CUBE), since_s=now.op_entered_ns / 1e9)
    assert facts == RankFacts(
        rank=3,
        phase=Phase.GRADIENT_SYNC,
        op=Op.REDUCE_SCATTER,
        group=Group.DP,
        seq=1,
        inside=not leave,
        members=Groups(CUBE).of(3),
        since_s=now.op_entered_ns / 1e9,
    )


def test_the_other_end_of_a_receive_says_which_neighbour_is_waited_for() -> None:
    """Stage 1 waits for stage 0 and stage 2 for stage 1; both neighbours would be a circle."""
    layout = Layout(pp=3)

    def stage(rank: int, op: Op, peer: int, *, is_inside: bool) -> RankFacts:
        last = Operation(op=op, group=Group.PP, seq=rank + 1, peer=peer, is_inside=is_inside)
        return facts_of(rank, Phase.FORWARD_BACKWARD, last, Groups(layout))

    stages = [
        stage(0, Op.SEND, 1, is_inside=False),
        stage(1, Op.RECV, 0, is_inside=True),
        stage(2, Op.RECV, 1, is_inside=True),
    ]
    assert [each.peer for each in stages] == [1, 0, 1]
    assert analyse(stages, layout=layout).culprits == (0,)


@pytest.mark.parametrize(("op", "group"), [("juggle", "tp"), ("send", "moon"), ("", "tp")])
def test_an_operation_of_another_version_is_refused(op: str, group: str) -> None:
    summary = agents_pb2.RankSummary(last_operation=agents_pb2.Operation(op=op, group=group))
    with pytest.raises(ValueError, match="is not one of"):
        operation_of(summary)
