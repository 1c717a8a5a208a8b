"""The report of a run: one verdict per node and one finding per link.

A link's trouble is the link's; it reaches a node's verdict only when the search
has named that node, or could not tell it from the link.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from diagnostics.core import agreement, links
from diagnostics.core.finding import CheckVerdict, Finding, Localises, ThresholdSource
from diagnostics.core.links import Exchange, Yardstick
from diagnostics.core.search import Outcome, Pair, SearchVerdict
from diagnostics.core.verdicts import FAIL_BELOW, NodeVerdict, fold, unmeasured

# What says that a device computes other bits than it should.
_OF_BITS = ("differing_elements", "differing_elements_under_load", agreement.METRIC)

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a run says of one node."""

    node: str
    verdict: NodeVerdict
    # Its worst figure against that figure's yardstick: 1 is as good as expected.
    figure: float | None
    # It is there, and its checks did not end in time.
    is_silent: bool = False
    # A device there computed other bits than it should, and nothing else said so.
    is_corrupt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run says of everything that it looked at."""

    nodes: tuple[NodeReport, ...]
    links: tuple[Finding, ...]
    # Findings that follow from all of it together: nodes named by the search.
    added: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def bad_links(self) -> tuple[Pair, ...]:
        """Links that the search has named."""
        return tuple(
            (found.node, found.peer) for found in self.links if found.verdict is CheckVerdict.FAIL
        )


def make(
    *,
    nodes: Sequence[str],
    findings: Sequence[Finding],
    exchanges: Sequence[Exchange],
    stick: Yardstick,
    search: SearchVerdict,
    silent: Sequence[str] = (),
) -> Report:
    """The report on `nodes`, given everything that was found on and between them."""
    added = [links.node_finding(node, exchanges, stick) for node in search.bad_nodes]
    for item in search.unresolved:
        for node in item.nodes:
            added.append(unmeasured(links.TEST, node, CheckVerdict.INCONCLUSIVE, item.reason))
    # Of a large fleet there are tens of thousands of both: none is looked through for each node.
    by_node = _grouped([*findings, *added], lambda found: (found.node,))
    exchanges_of = _grouped(exchanges, lambda exchange: exchange.pair)
    tried = _grouped(exchanges, lambda exchange: (exchange.pair,))
    return Report(
        nodes=tuple(
            NodeReport(
                node=node,
                verdict=fold(by_node.get(node, [])),
                figure=_figure(by_node.get(node, []), exchanges_of.get(node, []), stick),
                is_silent=node in silent,
                is_corrupt=any(
                    found.metric in _OF_BITS and found.verdict is CheckVerdict.FAIL
                    for found in by_node.get(node, [])
                ),
            )
            for node in nodes
        ),
        links=tuple(links.link_finding(pair, tried[pair], stick, search) for pair in tried),
        added=tuple(added),
        notes=tuple(_notes(search)),
    )


def _grouped(
    items: Iterable[_Item], keys_of: Callable[[_Item], Iterable[_Key]]
) -> dict[_Key, list[_Item]]:
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        for key in keys_of(item):
            groups.setdefault(key, []).append(item)
    return groups


def _figure(
    findings: Sequence[Finding], exchanges: Sequence[Exchange], stick: Yardstick
) -> float | None:
    """A node's worst figure; exchanges that failed are left out, since they have two ends."""
    ratios = [
        FAIL_BELOW * found.value / found.threshold
        for found in findings
        if found.threshold
        and found.threshold_source is ThresholdSource.OWN_BASELINE
        and found.localises is not Localises.LINK
    ]
    if stick.expected:
        ratios += [
            exchange.value / stick.expected
            for exchange in exchanges
            if exchange.value is not None and links.outcome_of(exchange, stick) is Outcome.GOOD
        ]
    return min(ratios, default=None)


def _notes(search: SearchVerdict) -> list[str]:
    notes = [item.reason for item in search.unresolved]
    if search.num_links_tested < search.num_links:
        notes.append(
            f"{search.num_links_tested} of {search.num_links} links gave an answer; one that "
            "gave none cannot be named"
        )
    return notes
