"""Where nodes stand: domains inside domains, such as a zone, a block of racks and a rack.

A path such as "block-1/rack-7" names those of a node, outermost first. What two nodes have in
common of their paths is the network that they need not leave. A job that starts gets the nodes of
one domain, of the smallest that has room; ranks follow each other through nodes, so those of one
domain come one after the other. A node that is replaced gets the nearest free one.

What does not belong here: which nodes may be used at all (`nodes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from outlast.ids import NodeId

Path = tuple[str, ...]
Standing = tuple[NodeId, Path]
# A fabric has three or four.
MAX_LEVELS = 8


def parsed(text: str) -> Path:
    """The domains that a path names, at most `MAX_LEVELS`."""
    return tuple(part for part in text.split("/") if part)[:MAX_LEVELS]


def compact(nodes: Sequence[Standing], count: int, depth: int = 0) -> list[NodeId]:
    """So many of these nodes, in as few and as small domains as can be, each domain in a row.

    `nodes` are in the order in which they are taken where their place makes no difference.
    """
    if not any(len(path) > depth for _, path in nodes):
        return [node for node, _ in nodes[:count]]
    domains = _split(nodes, depth)
    chosen: list[NodeId] = []
    while count > 0 and domains:
        fitting = [domain for domain in domains if len(domain) >= count]
        # The smallest that has room, so that larger ones stay whole for others.
        domain = min(fitting, key=len) if fitting else max(domains, key=len)
        domains.remove(domain)
        taken = min(count, len(domain))
        chosen += compact(domain, taken, depth + 1)
        count -= taken
    return chosen


class Nearest:
    """Free nodes, for places whose nodes should stand near a given one."""

    def __init__(self, classes: Sequence[Iterable[Standing]]) -> None:
        """`classes` come one after the other: no node of a later one is nearer than any before."""
        self._classes: list[dict[Path, deque[NodeId]]] = []
        for each in classes:
            by_domain: dict[Path, deque[NodeId]] = {}
            for node, path in each:
                for depth in range(len(path) + 1):
                    by_domain.setdefault(path[:depth], deque()).append(node)
            self._classes.append(by_domain)
        self._taken = set[NodeId]()

    def take(self, path: Path) -> NodeId | None:
        """The nearest to a path that is left, of the first class that has any; None: none is."""
        for by_domain in self._classes:
            for depth in range(len(path), -1, -1):
                left = by_domain.get(path[:depth], deque())
                while left and left[0] in self._taken:
                    left.popleft()
                if left:
                    self._taken.add(left[0])
                    return left.popleft()
        return None


def _split(nodes: Sequence[Standing], depth: int) -> list[Sequence[Standing]]:
    domains: dict[str, list[Standing]] = {}
    for node, path in nodes:
        domains.setdefault(path[depth] if len(path) > depth else "", []).append((node, path))
    return [*domains.values()]


def of_labels(labels: Mapping[str, str], names: Sequence[str]) -> str:
    """The path that a host's labels name, outermost first, as far as it has them."""
    found = []
    for name in names:
        if not labels.get(name):
            break
        found.append(labels[name].replace("/", "-"))
    return "/".join(found)
