"""A loop that has too much to do: what must not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from controller.core import events as ev
from controller.core.edge.edge import Edge
from controller.core.edge.listening import JUDGE_WITHIN_S
from controller.core.effects import SearchFaults
from controller.core.machine import Machine
from controller.core.node_events import NodeJoined, NodeLate, NodeSilent
from controller.deciding import BATCH_ITEMS, TURN_S
from controller.effects import Effects, UnmanagedCluster
from controller.service import Service
from controller.specs import settings_of
from controller.store.curves import Curves
from controller.store.database import Database
from controller.store.history import History
from controller.store.journal import Journal
from outlast.clock import SystemClock
from outlast.ids import NodeId
from tests.controller.fakes import until


class BusyLoop(asyncio.SelectorEventLoop):
    """A loop whose clock a test turns on: the work that took so long is only said to."""

    skew_s = 0.0

    def time(self) -> float:
        return super().time() + self.skew_s


class NoSearches:
    def begin(self, effect: SearchFaults) -> None:
        raise AssertionError("nobody searches here")

    def end(self, search: str) -> None:
        raise AssertionError("nobody searches here")


@asynccontextmanager
async def service_on(folder: Path) -> AsyncIterator[tuple[Service, Edge]]:
    """A service without servers; agents are events."""
    database = Database(folder / "journal.sqlite")
    journal = Journal(database, SystemClock())
    journal.take_over()
    machine = Machine(journal.load())
    edge = Edge(machine.state, settings_of)
    service = Service(
        machine=machine,
        journal=journal,
        curves=Curves(database),
        history=History(database),
        edge=edge,
        effects=Effects(lambda node, message: True, UnmanagedCluster(), NoSearches()),
        clock=SystemClock(),
    )
    running = asyncio.create_task(service.run())
    try:
        yield service, edge
    finally:
        service.stop()
        await running
        database.close()


def _joined(node: str) -> NodeJoined:
    return NodeJoined(
        node=NodeId(node),
        incarnation="one",
        address="10.0.0.1",
        rendezvous_port=29500,
        workers=1,
        statuses=(),
    )


@pytest.mark.parametrize("busy_s", [0.6, 1.2, 2.5])
def test_pauses_of_our_own_put_judging_off_for_five_seconds_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy_s: float
) -> None:
    """Three clients that watched 100,000 ranks did that: two judgements in 43 seconds."""
    kinds = _spied(monkeypatch)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, BusyLoop)
        async with service_on(tmp_path) as (service, edge):
            edge.told_period(NodeId("n1"), 2.0, loop.time())
            await service.tell(_joined("n1"))
            judged_s = [loop.time()]
            judge = edge.judge_silence

            def judging(now_s: float) -> list[ev.Event]:
                judged_s.append(now_s)
                return judge(now_s)

            edge.judge_silence = judging  # type: ignore[method-assign]  # only notes when
            begun_s = loop.time()
            while loop.time() - begun_s < 60.0:
                loop.skew_s += busy_s
                await service.tell()
            gaps = [b - a for a, b in pairwise(judged_s)]
            # The work itself comes on top: nobody can judge in the middle of it.
            assert max(gaps) <= JUDGE_WITHIN_S + 2 * busy_s + 0.5
            assert NodeSilent in kinds

    _run(scenario())


def test_after_a_long_absence_agents_are_heard_before_anyone_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was stopped for a minute, after the loop had been slow: what agents sent
    meanwhile is still to be read."""
    kinds = _spied(monkeypatch)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, BusyLoop)
        async with service_on(tmp_path) as (service, edge):
            edge.told_period(NodeId("n1"), 2.0, loop.time())
            await service.tell(_joined("n1"))
            loop.skew_s += 1.0
            await service.tell()
            loop.skew_s += 60.0
            await service.tell()
            await service.tell()
            edge.heard(NodeId("n1"), loop.time())
            loop.skew_s += 0.4
            await service.tell()
            assert NodeLate not in kinds

    _run(scenario())


def test_a_turn_ends_while_there_is_more_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that take long leave agents and clients their share of the loop."""
    handled = 0
    handle = Machine.handle

    async def scenario() -> None:
        nonlocal handled
        loop = asyncio.get_running_loop()
        assert isinstance(loop, BusyLoop)

        def slow(self: Machine, event: ev.Event, now_s: float) -> object:
            nonlocal handled
            handled += 1
            assert isinstance(loop, BusyLoop)
            loop.skew_s += TURN_S / 4
            return handle(self, event, now_s)

        async with service_on(tmp_path) as (service, _):
            await service.tell()
            monkeypatch.setattr(Machine, "handle", slow)
            for number in range(BATCH_ITEMS):
                service.post(_joined(f"n{number}"))
            seen = [handled]
            while handled < BATCH_ITEMS:
                await asyncio.sleep(0)
                seen.append(handled)
            steps = [b - a for a, b in pairwise(seen)]
            assert max(steps) <= 5
            await until(lambda: len(service.state.nodes) == BATCH_ITEMS, "all have joined")

    _run(scenario())


def _spied(monkeypatch: pytest.MonkeyPatch) -> list[type[object]]:
    """Kinds of the events that the machine handles from now on."""
    kinds: list[type[object]] = []
    handle = Machine.handle

    def spy(self: Machine, event: ev.Event, now_s: float) -> object:
        kinds.append(type(event))
        return handle(self, event, now_s)

    monkeypatch.setattr(Machine, "handle", spy)
    return kinds


def _run(scenario: object) -> None:
    with asyncio.Runner(loop_factory=BusyLoop) as runner:
        runner.run(scenario)  # type: ignore[arg-type]  # a coroutine
