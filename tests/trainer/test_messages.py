"""Every message meets its receive, within the buffers that the schedule says."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outlast.blackbox import Group, Op
from outlast.layout import Coordinate, Layout
from trainer.core.schedule import NAMES, Schedule, build, check, forward_only
from trainer.core.schedule.messages import (
    Channel,
    arrivals,
    incoming,
    last_used,
    links,
    num_buffers,
    outgoing,
)
from trainer.core.schedule.replay import Replay
from trainer.parallel.comm import NOTHING_KNOWN, Comm, Pending, Waited
from trainer.parallel.mailbox import Mailbox
from trainer.parallel.mesh import Mesh

# How long an example takes is not what these tests are about.
unhurried = settings(max_examples=60, deadline=None)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(NAMES))
    p, m = draw(st.integers(2, 5)), draw(st.integers(1, 12))
    if name == "interleaved":
        return build(name, p, m, num_chunks=draw(st.integers(2, 3)))
    if name == "zb-v":
        return build(name, p, m, num_chunks=2)
    extra = draw(st.integers(0, 2)) if name == "1f1b" else 0
    return build(name, p, m, extra_warmup=extra)


@st.composite
def evaluations(draw: st.DrawFn) -> Schedule:
    p, m, v = draw(st.integers(2, 5)), draw(st.integers(1, 12)), draw(st.integers(1, 3))
    return forward_only(p, m, num_chunks=v, folds=draw(st.booleans()))


@unhurried
@given(schedule=schedules())
def test_no_two_messages_between_two_ranks_have_one_number(schedule: Schedule) -> None:
    for stage in range(schedule.num_stages):
        for messages in arrivals(schedule, stage).values():
            numbers = [message.number(schedule.num_micro_batches) for message in messages]
            assert len(set(numbers)) == len(numbers)


@unhurried
@given(schedule=schedules())
def test_what_is_sent_is_what_is_awaited(schedule: Schedule) -> None:
    for stage, actions in enumerate(schedule.actions):
        awaited = [m for a in actions if (m := incoming(schedule, stage, a))]
        sent = [m for messages in arrivals(schedule, stage).values() for m in messages]
        assert Counter(awaited) == Counter(sent)
        # Everything that was received is also used up in the end.
        assert Counter(m for a in actions for m in last_used(schedule, stage, a)) == Counter(sent)


def test_links_are_connected_in_turns_that_do_not_grow_with_the_pipeline() -> None:
    up_and_down = ((0, 1), (1, 0), (2, 3), (3, 2), (1, 2), (2, 1))
    assert links(build("1f1b", 4, 4)) == up_and_down
    assert links(build("interleaved", 4, 4, num_chunks=2)) == (*up_and_down, (0, 3), (3, 0))
    assert links(build("interleaved", 2, 4, num_chunks=2)) == ((0, 1), (1, 0))


@unhurried
@given(p=st.integers(2, 8), m=st.integers(1, 24))
def test_1f1b_needs_as_many_buffers_as_its_neighbours_hold_micro_batches(p: int, m: int) -> None:
    schedule = build("1f1b", p, m)
    in_flight = check(schedule).peak_in_flight
    for stage in range(p):
        expected = {}
        if stage > 0:
            expected[Channel(forward=True, chunk=0)] = in_flight[stage - 1]
        if stage < p - 1:
            expected[Channel(forward=False, chunk=0)] = in_flight[stage]
        assert num_buffers(schedule, {stage}) == {stage: expected}


def buffers_by_definition(schedule: Schedule, stage: int) -> dict[Channel, int]:
    """Before each of its actions `stage` is late: the others go on until they must wait."""
    replay, others = Replay(schedule), [s for s in range(schedule.num_stages) if s != stage]
    alive: Counter[Channel] = Counter()
    most: dict[Channel, int] = {}
    for action in schedule.actions[stage]:
        ran = True
        while ran:
            done = [(other, replay.advance(other)) for other in others]
            ran = any(what is not None for _, what in done)
            for message in (outgoing(schedule, s, what) for s, what in done if what):
                if message is not None and message.receiver == stage:
                    alive[message.channel] += 1
                    most[message.channel] = max(
                        most.get(message.channel, 0), alive[message.channel]
                    )
        replay.advance(stage)
        alive.subtract(message.channel for message in last_used(schedule, stage, action))
    limit = schedule.num_micro_batches if schedule.trains else 2 * schedule.num_stages
    return {channel: min(count, limit) for channel, count in most.items()}


@unhurried
@given(schedule=st.one_of(schedules(), evaluations()))
def test_buffers_are_those_of_a_stage_that_is_late_at_each_action(schedule: Schedule) -> None:
    stages = range(schedule.num_stages)
    expected = {stage: buffers_by_definition(schedule, stage) for stage in stages}
    assert num_buffers(schedule, stages) == expected
    assert num_buffers(schedule, {1}) == {1: expected[1]}


class _Network:
    """Matches sends and receives between two ranks of a group by order, as NCCL does.

    Stricter than gloo, whose tags would forgive another order.
    """

    def __init__(self) -> None:
        self.posted: dict[tuple[str, int, int], deque[tuple[int, Tensor]]] = defaultdict(deque)
        self.arrived: set[int] = set()


class _Delivered:
    """A send that has ended."""

    def wait(self) -> None:
        pass


class _Awaited:
    """A receive; waiting for it before its message was sent is an error here."""

    def __init__(self, network: _Network, buffer: Tensor) -> None:
        self._network, self._buffer = network, buffer

    def wait(self) -> None:
        self._network.arrived.remove(self._buffer.data_ptr())


class _OrderedComm(Comm):
    def __init__(self, network: _Network, name: str, *, index: int, size: int) -> None:
        super().__init__(group=Group.PP, ranks=tuple(range(size)), index=index)
        self._network, self._name = network, name

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        posted = self._network.posted[self._name, self.index, peer]
        assert posted, "a send must find its receive"
        expected, buffer = posted.popleft()
        assert tag == expected
        buffer.copy_(tensor)
        self._network.arrived.add(buffer.data_ptr())
        return _Delivered()

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        self._network.posted[self._name, peer, self.index].append((tag, tensor))
        return _Awaited(self._network, tensor)

    def wait(self, works: Sequence[Pending], op: Op, waited: Waited = NOTHING_KNOWN) -> None:
        for work in works:
            work.wait()


def _mailboxes(schedule: Schedule, network: _Network) -> list[Mailbox]:
    size = schedule.num_stages
    boxes = []
    for stage in range(size):
        alone = Comm(group=Group.TP, ranks=(stage,), index=0)
        mesh = Mesh(
            layout=Layout(pp=size),
            rank=stage,
            at=Coordinate(tp=0, dp=0, pp=stage),
            device=torch.device("cpu"),
            tp=alone,
            dp=alone,
            pp=_OrderedComm(network, "up", index=stage, size=size),
            pp_back=_OrderedComm(network, "down", index=stage, size=size),
            embedding=alone,
            ep=alone,
            expert_dp=alone,
            cp=alone,
        )
        boxes.append(Mailbox(mesh, schedule, torch.empty(1)))
    return boxes


@unhurried
@given(schedule=schedules(), seed=st.integers(0, 2**32))
def test_however_late_a_stage_is_each_send_finds_its_receive(schedule: Schedule, seed: int) -> None:
    """Stages run in any order that their messages allow, for two steps."""
    random = Random(seed)
    boxes = _mailboxes(schedule, _Network())
    for _ in range(2):
        replay = Replay(schedule)
        for box in boxes:
            box.open()
        unfinished = list(range(schedule.num_stages))
        while unfinished:
            stage = random.choice(unfinished)
            action = replay.advance(stage)
            if action is None:
                if replay.next_action(stage) is None:
                    unfinished.remove(stage)
                continue
            needed = incoming(schedule, stage, action)
            if needed is not None:
                assert boxes[stage].take(needed).item() == needed.number(99)
            made = outgoing(schedule, stage, action)
            if made is not None:
                boxes[stage].send(made, torch.tensor([float(made.number(99))]))
            for message in last_used(schedule, stage, action):
                boxes[stage].release(message)
        for box in boxes:
            box.close()


@unhurried
@given(p=st.integers(2, 6), m=st.integers(1, 30), v=st.integers(1, 3))
def test_evaluation_ends_though_senders_wait_for_buffers(p: int, m: int, v: int) -> None:
    """Nothing but the buffers holds a stage back, and they are enough to go on."""
    schedule = forward_only(p, m, num_chunks=v)
    limits = num_buffers(schedule, range(p))
    assert all(count <= 2 * p for channels in limits.values() for count in channels.values())
    free = {
        (stage, channel): count for stage in range(p) for channel, count in limits[stage].items()
    }
    replay = Replay(schedule)
    progress = True
    while progress:
        progress = False
        for stage in range(p):
            upcoming = replay.next_action(stage)
            if upcoming is None:
                continue
            made = outgoing(schedule, stage, upcoming)
            if made is not None and free[made.receiver, made.channel] == 0:
                continue
            if replay.advance(stage) is None:
                continue
            progress = True
            if made is not None:
                free[made.receiver, made.channel] -= 1
            for message in last_used(schedule, stage, upcoming):
                free[stage, message.channel] += 1
    assert [replay.next_action(stage) for stage in range(p)] == [None] * p


def test_buffers_do_not_grow_with_the_number_of_micro_batches() -> None:
    for name, num_chunks in (("1f1b", 1), ("interleaved", 2)):
        few, many = (build(name, 4, m, num_chunks=num_chunks) for m in (16, 64))
        assert num_buffers(few, range(4)) == num_buffers(many, range(4))


@pytest.mark.parametrize("stage", range(4))
def test_gpipe_may_have_to_hold_every_message(stage: int) -> None:
    assert set(num_buffers(build("gpipe", 4, 9), {stage})[stage].values()) == {9}
