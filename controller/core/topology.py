"""Where nodes stand: domains inside domains, such as a zone, a block of racks and a rack.

A path such as "block-1/rack-7" names those of a node, outermost first. What two nodes have in
common of their paths is the network that they need not leave. A job that starts gets the nodes of
one domain, of the smallest that has room; ranks follow each other through nodes, so those of one
domain come one after the other. A node that is replaced gets the nearest free one.

What does not belong here: which nodes may be used at all (`nodes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from outlast.ids import NodeId

Path = tuple[str, ...]
Standing = tuple[NodeId, Path]
# A fabric has three or four.
MAX_LEVELS = 8


def parsed(text: str) -> Path:
    """The domains that a path names, at most `MAX_LEVELS`."""
    return tuple(part for part in text.split("/") if part)[:MAX_LEVELS]


def compact(nodes: Sequence[Standing], count: int) -> list[NodeId]:
    """So many of these nodes, in as few and as small domains as can be, each domain in a row.

    `nodes` are in the order in which they are taken where their place makes no difference.
    """
    if not count or not any(path for _, path in nodes):
        return [node for node, _ in nodes[:count]]
    by_path: dict[Path, list[Standing]] = {(): [*nodes]}
    for node, path in nodes:
        for depth in range(1, len(path) + 1):
            by_path.setdefault(path[:depth], []).append((node, path))
    # The innermost that has room; of these the smallest, so that larger ones stay whole for others.
    with_room = (path for path, within in by_path.items() if len(within) >= count)
    best = min(with_room, key=lambda path: (-len(path), len(by_path[path])), default=())
    return _filled(by_path[best], count, len(best))


def _filled(nodes: Sequence[Standing], count: int, depth: int) -> list[NodeId]:
    """So many of the nodes of one domain, of which none inside has room for all."""
    if not any(len(path) > depth for _, path in nodes):
        return [node for node, _ in nodes[:count]]
    domains = sorted(_split(nodes, depth), key=len, reverse=True)
    chosen: list[NodeId] = []
    for index, domain in enumerate(domains):
        fitting = [other for other in domains[index:] if len(other) >= count]
        if fitting:
            return chosen + compact(min(fitting, key=len), count)
        chosen += compact(domain, len(domain))
        count -= len(domain)
    return chosen


def choose(wanted: Sequence[Path], classes: Iterable[Sequence[Standing]]) -> list[NodeId | None]:
    """A node for each place, near to where it is wanted; None where none is left.

    `()` is anywhere. All of a class are taken before any of the next. Places that are wanted at the
    same one are together, and near to it as far as that goes.
    """
    chosen: list[NodeId | None] = [None] * len(wanted)
    for nodes in classes:
        left = [*nodes]
        alike: dict[Path, list[int]] = {}
        for place, path in enumerate(wanted):
            if chosen[place] is None:
                alike.setdefault(path, []).append(place)
        for path, places in alike.items():
            found = _near(left, path, min(len(places), len(left)))
            taken = set(found)
            left = [each for each in left if each[0] not in taken]
            for place, node in zip(places, found, strict=False):
                chosen[place] = node
    return chosen


def _near(nodes: Sequence[Standing], path: Path, count: int) -> list[NodeId]:
    """So many nodes of the smallest domain around a path that has as many."""
    for depth in range(len(path), 0, -1):
        within = [(node, own) for node, own in nodes if own[:depth] == path[:depth]]
        if len(within) >= count:
            return compact(within, count)
    return compact(nodes, count)


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
