"""One run of diagnostics: checks on every node at once, then exchanges between them.

What is asked next, and what all of it means, is decided by pure functions of
`diagnostics.core`; here is only the asking, in parallel and each with a deadline.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from controller.changes import Changes
from controller.convert import finding_message
from controller.core.edge.reports import finding_of
from controller.diagnosis.asking import START_ALLOWANCE_S, Answer, Asking, broken
from diagnostics.core import agreement, links, report
from diagnostics.core.baseline import Baseline
from diagnostics.core.finding import CheckVerdict, Finding
from diagnostics.core.links import Exchange, Yardstick
from diagnostics.core.plans import SUITES, Suite
from diagnostics.core.search import (
    ROUNDS,
    Pair,
    PairTest,
    SearchVerdict,
    conclude,
    plan_round,
    waves,
)
from outlast.ids import NodeId
from outlast.v1 import agents_pb2, diagnostics_pb2

MANUAL = "manual"
MAX_FINDINGS = 20_000
# How long an agent may take to say what its runner has finished.
_ANSWER_ALLOWANCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be checked, and what must be known of it."""

    run_id: str
    suite: str
    origin: str
    """`MANUAL`, or the incident whose cause is looked for."""
    nodes: tuple[NodeId, ...]
    spares: tuple[NodeId, ...] = ()
    """Partners for nodes that nobody else can clear; checked like the others."""
    addresses: Mapping[NodeId, str] = field(default_factory=dict)
    checkpoint_urls: Mapping[NodeId, str] = field(default_factory=dict)
    disturbed: frozenset[NodeId] = frozenset()
    """A job trains there: slowness is no sign of a fault."""
    timeout_s: float = math.inf
    """From the request until the report; what there is by then is reported."""

    @property
    def everyone(self) -> tuple[NodeId, ...]:
        return (*self.nodes, *self.spares)


@dataclass(slots=True, eq=False)
class Progress:
    """A run as it stands, for those who watch."""

    request: Request
    findings: list[diagnostics_pb2.Finding] = field(default_factory=list)
    pending: list[NodeId] = field(default_factory=list)
    phase: str = ""
    notes: list[str] = field(default_factory=list)
    # Set once, when it is over.
    result: diagnostics_pb2.DiagnosticRun | None = None
    changes: Changes = field(default_factory=Changes)

    def add(self, *findings: diagnostics_pb2.Finding) -> None:
        self.findings.extend(findings[: MAX_FINDINGS - len(self.findings)])
        self.changes.fire()

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.changes.fire()


class DiagnosticsRunner:
    """Carries one request out."""

    def __init__(
        self, progress: Progress, asking: Asking, baseline: Baseline, *, ends_at: float
    ) -> None:
        """`ends_at` is by the loop's clock."""
        self._progress = progress
        self._request = progress.request
        self._asking = asking
        # Of exchanges in earlier runs; grows by this run's healthy ones.
        self.baseline = baseline
        self._suite: Suite = SUITES[self._request.suite]
        self._exchanges: list[Exchange] = []
        # Connected, and their checks did not end in time.
        self._silent: list[NodeId] = []
        self._ends_at = ends_at

    async def run(self) -> report.Report:
        """Everything there is to say about the nodes of the request."""
        answered = await self._check_nodes()
        nodes = [node for node in self._request.nodes if node in answered]
        spares = [node for node in self._request.spares if node in answered]
        # In threads: of a large fleet it takes seconds, which the machine must not wait.
        own, compared = await asyncio.to_thread(self._compared)
        self._add(*compared)
        verdict, stick = await self._search(nodes, spares)
        found = await asyncio.to_thread(
            report.make,
            nodes=self._request.everyone,
            findings=[*own, *compared],
            exchanges=self._exchanges,
            stick=stick,
            search=verdict,
            silent=self._silent,
        )
        self._progress.notes.extend(found.notes)
        self._add(*found.added)
        self.baseline = links.extended(self.baseline, self._exchanges, stick)
        return found

    async def _check_nodes(self) -> list[NodeId]:
        """Run the suite everywhere at once; the nodes that answered."""
        request, progress = self._request, self._progress
        progress.pending = list(request.everyone)
        progress.enter(f"checking {len(request.everyone)} node(s)")
        answers = await asyncio.gather(*(self._check_node(node) for node in request.everyone))
        return [answer.node for answer in answers if answer.is_whole]

    async def _check_node(self, node: NodeId) -> Answer:
        order = self._order(node, self._suite.deadline_s)
        order.on_this_node.SetInParent()
        answer = self._asking.ask(self._request.run_id, node, order, self._progress.add)
        try:
            allowed_s = self._suite.deadline_s + START_ALLOWANCE_S
            timeout_s = min(allowed_s, self._left_s())
            if not await self._asking.until(answer, lambda found: found.is_whole, timeout_s):
                # One that had less than its time may be sound.
                is_silent = answer.is_late and timeout_s == allowed_s
                verdict = (
                    CheckVerdict.INCONCLUSIVE
                    if answer.is_late and not is_silent
                    else CheckVerdict.ERROR
                )
                self._progress.add(broken(node, self._suite.name, answer.lost, verdict))
                if is_silent:
                    self._silent.append(node)
        finally:
            self._asking.forget([answer])
            self._progress.pending.remove(node)
            self._progress.changes.fire()
        return answer

    def _compared(self) -> tuple[list[Finding], list[Finding]]:
        """What was found, and of that what follows: devices of one kind compute the same."""
        findings = [finding_of(finding) for finding in tuple(self._progress.findings)]
        return findings, list(agreement.compare(findings))

    async def _search(
        self, nodes: list[NodeId], spares: list[NodeId]
    ) -> tuple[SearchVerdict, Yardstick]:
        """Exchanges between nodes, round after round, until there is nothing left to tell."""
        # Which links of a large fleet are met should not be the same each time.
        order: list[str] = [*nodes]
        Random(self._request.run_id).shuffle(order)
        tests: list[PairTest] = []
        stick = links.yardstick((), self.baseline)
        for number in range(ROUNDS):
            pairs = await asyncio.to_thread(plan_round, order, tests, spares=spares)
            if not pairs:
                break
            is_whole = await self._exchange_all(pairs, number)
            stick = links.yardstick(self._exchanges, self.baseline)
            tests = [
                PairTest(pair=item.pair, round=item.round, outcome=links.outcome_of(item, stick))
                for item in self._exchanges
            ]
            if not is_whole:
                self._progress.notes.append("the time was up before every exchange was done")
                break
        return await asyncio.to_thread(conclude, order, tests, spares=spares), stick

    async def _exchange_all(self, pairs: Sequence[Pair], number: int) -> bool:
        """The exchanges of one round; whether there was time for all of them."""
        for wave in await asyncio.to_thread(waves, pairs):
            if self._left_s() < self._suite.pair_deadline_s:
                return False
            names = f"{len(self._exchanges)} exchanges done, {len(wave)} under way"
            self._progress.enter(f"round {number + 1}, at most {ROUNDS}: {names}")
            found = await asyncio.gather(*(self._exchange(pair, number) for pair in wave))
            self._exchanges.extend(found)
        return True

    async def _exchange(self, pair: Pair, number: int) -> Exchange:
        """One test of two nodes; they take turns at being the host."""
        host, guest = (NodeId(node) for node in (pair if number % 2 == 0 else reversed(pair)))
        deadline_s = self._suite.pair_deadline_s
        asking, run_id = self._asking, self._request.run_id
        hosting = self._order(host, deadline_s)
        hosting.host.peer = guest
        answers = [asking.ask(run_id, host, hosting)]
        try:
            start_s = min(START_ALLOWANCE_S + deadline_s, self._left_s())
            if await asking.until(answers[0], lambda found: found.port is not None, start_s):
                visiting = self._order(guest, deadline_s)
                visiting.guest.peer = host
                visiting.guest.peer_address = self._request.addresses[host]
                visiting.guest.peer_port = answers[0].port or 0
                answers.append(asking.ask(run_id, guest, visiting))
                whole_s = START_ALLOWANCE_S + deadline_s + _ANSWER_ALLOWANCE_S
                whole_s = min(whole_s, self._left_s())
                await asyncio.gather(
                    *(
                        asking.until(answer, lambda found: found.is_whole, whole_s)
                        for answer in answers
                    )
                )
        finally:
            asking.forget(answers)
        return links.exchange_of(
            pair,
            number,
            _sides(answers),
            is_disturbed=bool({host, guest} & self._request.disturbed),
        )

    def _left_s(self) -> float:
        return self._ends_at - asyncio.get_running_loop().time()

    def _order(self, node: NodeId, deadline_s: float) -> agents_pb2.CheckOrder:
        return agents_pb2.CheckOrder(
            suite=self._suite.name,
            timeout_s=deadline_s,
            checkpoint_url=self._request.checkpoint_urls.get(node, ""),
            is_disturbed=node in self._request.disturbed,
        )

    def _add(self, *findings: Finding) -> None:
        self._progress.add(*(finding_message(finding) for finding in findings))


def _sides(answers: list[Answer]) -> list[list[Finding] | None]:
    """What each side said; None for one that did not take part."""
    sides: list[list[Finding] | None] = [
        [finding_of(finding) for finding in answer.findings] if answer.is_whole else None
        for answer in answers
    ]
    if len(answers) < 2:
        return [*sides, None]
    host, guest = answers
    if guest.begun_s is None or (host.ended_s is not None and guest.begun_s > host.ended_s):
        # It was busy with something else until the host had given up.
        sides[1] = None
    return sides
