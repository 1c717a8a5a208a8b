"""Check orders: what a run of diagnostics asks of this node, answered as it comes.

Orders live with the connection. When it breaks, whoever asked is gone, and a new
controller starts its runs anew; so nothing is kept, and what runs is ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from controller.agent.config import AgentConfig
from controller.agent.diagnostics import SuiteError, Suites
from controller.agent.session import SessionLostError
from diagnostics.core.orders import Order, OrderKind
from outlast.v1 import agents_pb2, diagnostics_pb2

logger = logging.getLogger(__name__)

Send = Callable[[agents_pb2.AgentMessage], Awaitable[None]]


class CheckOrders:
    """Carries out the orders of runs, one after another."""

    def __init__(self, config: AgentConfig, suites: Suites, send: Send) -> None:
        self._config = config
        self._suites = suites
        self._send = send
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def take(self, asked: agents_pb2.CheckOrder) -> None:
        """Carry an order out, after those that wait already, or stop one."""
        order_id = asked.order_id
        if asked.WhichOneof("kind") == "stop":
            if order_id in self._tasks:
                self._tasks[order_id].cancel()
            return
        task = asyncio.create_task(self._run(asked), name=f"check-{order_id}")
        self._tasks[order_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(order_id))

    def cancel_all(self) -> None:
        """Whoever asked is gone."""
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """End what runs and wait for it."""
        self.cancel_all()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, asked: agents_pb2.CheckOrder) -> None:
        async def finding(found: diagnostics_pb2.Finding) -> None:
            await self._report(agents_pb2.CheckReport(order_id=asked.order_id, findings=[found]))

        async def begun() -> None:
            await self._report(agents_pb2.CheckReport(order_id=asked.order_id, begun=True))

        async def listening(port: int) -> None:
            await self._report(agents_pb2.CheckReport(order_id=asked.order_id, listening_port=port))

        try:
            try:
                if len(self._tasks) > self._config.limits.max_check_orders:
                    raise SuiteError(f"{len(self._tasks) - 1} orders are waiting here already")
                order = order_of(asked, self._config.address)
                await self._suites.run(order, finding, listening, begun)
            except SessionLostError:
                raise
            except Exception as error:
                # Whatever broke, whoever asked must hear that there will be no more: silence
                # would look like a node that does not work.
                if not isinstance(error, SuiteError):
                    logger.exception("check order %s failed", asked.order_id)
                await finding(
                    diagnostics_pb2.Finding(
                        test=asked.suite,
                        node=self._config.node,
                        verdict="error",
                        detail=str(error) or type(error).__name__,
                    )
                )
            await self._report(agents_pb2.CheckReport(order_id=asked.order_id, done=True))
        except SessionLostError:
            logger.info("check order %s: whoever asked is gone", asked.order_id)

    async def _report(self, report: agents_pb2.CheckReport) -> None:
        await self._send(agents_pb2.AgentMessage(check_report=report))


def order_of(asked: agents_pb2.CheckOrder, address: str) -> Order:
    """An order off the wire, for the runner."""
    kinds = {"host": OrderKind.HOST, "guest": OrderKind.GUEST}
    kind = kinds.get(asked.WhichOneof("kind") or "", OrderKind.SUITE)
    half = asked.guest if kind is OrderKind.GUEST else asked.host
    return Order(
        kind=kind,
        suite=asked.suite,
        deadline_s=asked.timeout_s,
        checkpoint_url=asked.checkpoint_url,
        is_disturbed=asked.is_disturbed,
        address=address,
        peer=half.peer,
        peer_address=asked.guest.peer_address,
        peer_port=asked.guest.peer_port,
    )
