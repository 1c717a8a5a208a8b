"""Runs of diagnostics for the machine: their time, and their end before they are over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from controller.counters import Counters
from controller.diagnosis.run import Request
from controller.diagnosis.runs import DiagnosticRuns
from controller.sessions.session import AgentSession, Sessions
from controller.store.database import Database
from controller.store.diagnoses import INTERRUPTED, Diagnoses
from diagnostics.core.finding import CheckVerdict
from diagnostics.core.plans import PREFLIGHT, Check
from diagnostics.core.report import NodeReport, Report
from outlast.clock import SystemClock
from outlast.ids import NodeId
from outlast.v1 import agents_pb2
from tests.controller.fakes import until

NODES = tuple(NodeId(f"n{number}") for number in range(4))
SHORT = replace(PREFLIGHT, checks=(Check(name="device", deadline_s=0.2),), pair_deadline_s=0.2)


class Fleet:
    """Nodes that are connected and answer the kinds of orders that they are told to."""

    def __init__(self, folder: Path, answered: Sequence[str]) -> None:
        self._sessions = Sessions()
        self._database = Database(folder / "journal.sqlite")
        self._answered = answered
        self.runs = DiagnosticRuns(
            self._sessions, Diagnoses(self._database), SystemClock(), Counters()
        )
        self.orders: list[agents_pb2.CheckOrder] = []
        self._tasks = [
            asyncio.create_task(self._answer(self._sessions.open(node, "one"))) for node in NODES
        ]

    async def _answer(self, session: AgentSession) -> None:
        async for message in session.outgoing():
            order = message.check_order
            self.orders.append(order)
            if order.WhichOneof("kind") in self._answered:
                report = agents_pb2.CheckReport(order_id=order.order_id, begun=True, done=True)
                report.findings.add(test="device", verdict="pass", metric="speed", value=1.0)
                self.runs.deliver(session.node, report)

    def stopped(self) -> list[str]:
        return [order.order_id for order in self.orders if order.WhichOneof("kind") == "stop"]

    async def report(self, timeout_s: float, run_id: str = "r1") -> Report:
        """What comes of a run over all nodes that has so much time."""
        ended: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        self.runs.start_when_free(request(run_id, timeout_s), ended.set_result)
        return await ended

    async def close(self) -> None:
        await self.runs.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._database.close()


@asynccontextmanager
async def fleet(folder: Path, *answered: str) -> AsyncIterator[Fleet]:
    made = Fleet(folder, answered)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
def short_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.diagnosis.run.SUITES", {"preflight": SHORT})
    monkeypatch.setattr("controller.diagnosis.run.START_ALLOWANCE_S", 0.2)


def request(run_id: str, timeout_s: float) -> Request:
    return Request(
        run_id=run_id,
        suite="preflight",
        origin="an incident",
        nodes=NODES,
        addresses=dict.fromkeys(NODES, "127.0.0.1"),
        timeout_s=timeout_s,
    )


def told(nodes: Sequence[NodeReport]) -> set[tuple[CheckVerdict, bool]]:
    return {(node.verdict.verdict, node.is_silent) for node in nodes}


def test_only_a_node_that_had_its_whole_time_is_silent(tmp_path: Path, short_suite: None) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as nodes:
            impatient = await nodes.report(0.1)
            assert told(impatient.nodes) == {(CheckVerdict.INCONCLUSIVE, False)}
            patient = await nodes.report(60.0, "r2")
            assert told(patient.nodes) == {(CheckVerdict.ERROR, True)}
            # Nobody waits for either: the agents need not go on.
            await until(lambda: len(nodes.stopped()) == 2 * len(NODES), "all orders are stopped")

    asyncio.run(scenario())


def test_the_time_of_a_run_passes_while_it_waits_for_its_nodes(
    tmp_path: Path, short_suite: None
) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as nodes:
            nodes.runs.start(request("by hand", 60.0))
            # The other one holds the nodes for longer than this one has.
            report = await nodes.report(0.1)
            assert told(report.nodes) == {(CheckVerdict.INCONCLUSIVE, False)}

    asyncio.run(scenario())


def test_exchanges_end_with_their_run_and_it_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_suite: None
) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, "on_this_node") as nodes:
            # A partner may take longer than any test does.
            suite = replace(SHORT, pair_deadline_s=0.9)
            monkeypatch.setattr("controller.diagnosis.run.SUITES", {"preflight": suite})
            monkeypatch.setattr("controller.diagnosis.run.START_ALLOWANCE_S", 3600.0)
            report = await nodes.report(1.0)
            assert told(report.nodes) == {(CheckVerdict.PASS, False)}
            run = nodes.runs.get("r1")
            assert run is not None
            assert sum("time was up" in note for note in run.notes) == 1

    asyncio.run(scenario())


def test_a_run_that_nobody_waits_for_ends_and_so_do_its_checks(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as nodes:
            ended: list[Report] = []
            nodes.runs.start_when_free(request("r1", 600.0), ended.append)
            await until(lambda: len(nodes.orders) == len(NODES), "every node is asked")
            nodes.runs.cancel("r1")
            nodes.runs.cancel("another")
            asked = [order.order_id for order in nodes.orders]
            await until(lambda: sorted(nodes.stopped()) == sorted(asked), "every node may stop")
            run = nodes.runs.kept.get("r1")
            assert run is not None
            assert run.state == INTERRUPTED
            assert "nobody waited" in run.notes[-1]
            assert not ended

    asyncio.run(scenario())
