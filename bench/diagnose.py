"""`outlast diagnose` again and again: does it name what is broken, and only that?

Five nodes as network namespaces with a controller and agents of their own, as in
`tests/netns`. Healthy runs must name nobody; then one link carries a fiftieth of
the others, another one each time, and then the arithmetic of one node is off by
one bit. Needs root.

    python -m bench.diagnose [--healthy 20] [--faulty 5]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from bench.results import Claim, write
from tests.netns.fleet import Fleet, why_not

NUM_NODES = 5
_HOW = f"{NUM_NODES} network namespaces, real controller and agents, `outlast diagnose`"

# What is done to the fleet, and the nodes and links that must be named for it.
Case = tuple[str, AbstractContextManager[object], list[str], list[tuple[str, str]], list[str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--faulty", type=int, default=5)
    options = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"bench diagnose: {reason}", file=sys.stderr)
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder,
        Fleet(Path(folder), NUM_NODES).running() as fleet,
    ):
        rows = [_run(fleet, case) for case in _cases(fleet, options.healthy, options.faulty)]
    write("diagnose", rows, _claims(rows))
    return 0 if all(row["is_right"] for row in rows) else 1


def _cases(fleet: Fleet, healthy: int, faulty: int) -> Iterator[Case]:
    for _ in range(healthy):
        yield "healthy", nullcontext(), [], [], []
    links = itertools.cycle(itertools.combinations(fleet.nodes, 2))
    for one, other in itertools.islice(links, faulty):
        yield "link", fleet.limited_link(one, other), [], [(one, other)], []
    for _ in range(faulty):
        # The suite after a fault: it computes for longer.
        suite = ["--suite", "on-failure"]
        yield "arithmetic", fleet.one_bit_off(), [fleet.nodes[-1]], [], suite


def _run(fleet: Fleet, case: Case) -> dict[str, Any]:
    kind, fault, nodes, links, arguments = case
    with fault:
        _, run = fleet.diagnose(*arguments)
    named = [report["node"] for report in run["node_reports"] if report["verdict"] == "fail"]
    bad = [(link["node"], link["peer"]) for link in run["links"] if link["verdict"] == "fail"]
    row = {
        "kind": kind,
        "took_s": run["ended_s"] - run["started_s"],
        "named_nodes": named,
        "named_links": bad,
        "is_right": (named, bad) == (nodes, links),
        "suite": run["suite"],
    }
    print(f"{kind}: {row['took_s']:.1f} s, right: {row['is_right']}", flush=True)
    return row


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    claims = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        found = [row for row in rows if row["kind"] == kind]
        claims.append(
            Claim(
                claim=f"{kind} runs that named exactly what is broken",
                value=sum(row["is_right"] for row in found) / len(found),
                unit=f"share of {len(found)} runs",
                goal="= 1",
                baseline="none",
                how=_HOW,
            )
        )
        claims.append(
            Claim(
                claim=f"time of a {kind} run, median",
                value=statistics.median(row["took_s"] for row in found),
                unit="s",
                goal="<= 300",
                baseline="none",
                how=_HOW,
            )
        )
    return claims


if __name__ == "__main__":
    sys.exit(main())
