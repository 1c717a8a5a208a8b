"""Check orders to agents and what they answer, each with a deadline.

An order is a message, not a command: nothing is journalled. An agent that leaves
takes its answers with it, and whatever comes for an order that nobody waits for
any more is dropped, be it late or from another run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from controller.sessions.session import Sessions
from diagnostics.core.finding import CheckVerdict
from outlast.ids import NodeId
from outlast.v1 import agents_pb2, diagnostics_pb2

logger = logging.getLogger(__name__)

# On top of what the checks may take: an interpreter with torch on a busy node.
START_ALLOWANCE_S = 60.0
# A sane suite has tens.
MAX_FINDINGS_OF_ORDER = 10_000

OnFinding = Callable[[diagnostics_pb2.Finding], None]


@dataclass(slots=True, eq=False)
class Answer:
    """What has come of one order so far."""

    node: NodeId
    on_finding: OnFinding | None
    findings: list[diagnostics_pb2.Finding] = field(default_factory=list)
    port: int | None = None
    # By the loop's clock.
    begun_s: float | None = None
    ended_s: float | None = None
    # Why there will be no more of it, "" while there may be.
    lost: str = ""
    # Its agent was there all the time, and the time was up.
    is_late: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_whole(self) -> bool:
        """Whether the agent has carried the order out."""
        return self.ended_s is not None

    @property
    def is_over(self) -> bool:
        return self.is_whole or bool(self.lost)

    def give_up(self, why: str) -> None:
        if not self.is_over:
            self.lost = why
            self.changed.set()


class Asking:
    """Sends orders and routes answers to whoever waits for them."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._open: dict[str, Answer] = {}
        self._numbers = itertools.count(1)
        sessions.on_closed(self._node_left)

    def deliver(self, node: NodeId, report: agents_pb2.CheckReport) -> None:
        """Something from an agent."""
        answer = self._open.get(report.order_id)
        if answer is None or answer.node != node or answer.is_over:
            logger.debug("check report dropped: node=%s order=%s", node, report.order_id)
            return
        now_s = asyncio.get_running_loop().time()
        if report.begun:
            answer.begun_s = now_s
        if report.HasField("listening_port"):
            answer.port = report.listening_port
        room = MAX_FINDINGS_OF_ORDER - len(answer.findings)
        for finding in report.findings[:room]:
            # Whatever a node says, it says of itself.
            finding.node = node
            answer.findings.append(finding)
            if answer.on_finding is not None:
                answer.on_finding(finding)
        if report.done:
            answer.ended_s = now_s
        answer.changed.set()

    def ask(
        self,
        run_id: str,
        node: NodeId,
        order: agents_pb2.CheckOrder,
        on_finding: OnFinding | None = None,
    ) -> Answer:
        """Send an order; its answer fills as reports come. `forget` it in the end."""
        order.order_id = f"{run_id}/{next(self._numbers)}"
        answer = self._open[order.order_id] = Answer(node=node, on_finding=on_finding)
        if not self._sessions.send(node, agents_pb2.ControllerMessage(check_order=order)):
            answer.give_up("the node is not connected")
        return answer

    async def until(
        self, answer: Answer, condition: Callable[[Answer], bool], timeout_s: float
    ) -> bool:
        """Wait until `condition` holds; False when it will not, or not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(answer) and not answer.is_over:
                    answer.changed.clear()
                    await answer.changed.wait()
        except TimeoutError:
            answer.is_late = True
            answer.give_up(f"the node did not answer within {timeout_s:.0f} s")
        return condition(answer)

    def forget(self, answers: list[Answer]) -> None:
        """Nobody waits for these any more; agents still at work on one may stop."""
        for order_id, answer in self._open.items():
            if not answer.is_whole and any(answer is done for done in answers):
                stop = agents_pb2.CheckOrder(order_id=order_id)
                stop.stop.SetInParent()
                self._sessions.send(answer.node, agents_pb2.ControllerMessage(check_order=stop))
        self._open = {
            order_id: answer
            for order_id, answer in self._open.items()
            if all(answer is not done for done in answers)
        }

    def _node_left(self, node: NodeId) -> None:
        for answer in self._open.values():
            if answer.node == node:
                answer.give_up("the agent's session ended before its checks did")


def broken(
    node: NodeId, test: str, why: str, verdict: CheckVerdict = CheckVerdict.ERROR
) -> diagnostics_pb2.Finding:
    """The finding that a test said nothing."""
    return diagnostics_pb2.Finding(
        test=test,
        node=node,
        verdict=str(verdict),
        localises="node",
        threshold_source="none",
        detail=why,
    )
