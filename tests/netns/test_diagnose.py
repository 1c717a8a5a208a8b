"""`outlast diagnose` on nodes that are network namespaces: it names what is broken, exactly.

The faults are real: traffic shaping between two nodes, and a node whose arithmetic
is off by one bit. `make bench-diagnose` repeats the healthy run of all nodes twenty times.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.netns.fleet import Fleet, why_not

NUM_NODES = 5

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs"),
    # Five agents that import torch on two cores, and twenty runs.
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), NUM_NODES).running() as running:
        yield running


def accused(run: dict[str, Any]) -> tuple[list[str], list[tuple[str, str]]]:
    """The nodes and links that a run names."""
    assert run["state"] == "done", run["notes"]
    return (
        [report["node"] for report in run["node_reports"] if report["verdict"] == "fail"],
        [(link["node"], link["peer"]) for link in run["links"] if link["verdict"] == "fail"],
    )


def test_twenty_healthy_runs_in_a_row_name_nobody(fleet: Fleet) -> None:
    """All nodes once and again, then each three of them, which costs a third of the time."""
    threes = list(itertools.combinations(fleet.nodes, 3))
    runs = [tuple(fleet.nodes)] * 2 + threes + threes[:8]
    assert len(runs) == 20
    for nodes in runs:
        code, run = fleet.diagnose("--nodes", ",".join(nodes))
        assert accused(run) == ([], []), json.dumps(run, indent=1)
        assert code == 0
        assert [report["node"] for report in run["node_reports"]] == list(nodes)
        assert len(run["links"]) == len(nodes) * (len(nodes) - 1) // 2


def test_a_link_limited_to_a_fiftieth_is_named_and_nothing_else(fleet: Fleet) -> None:
    with fleet.limited_link("n1", "n3"):
        code, run = fleet.diagnose()
    assert accused(run) == ([], [("n1", "n3")]), json.dumps(run, indent=1)
    assert code == 1
    (link,) = (link for link in run["links"] if link["verdict"] == "fail")
    assert (link["threshold_source"], link["localises"]) == ("peers", "link")
    assert link["value"] < link["threshold"] / 5


def test_a_node_whose_arithmetic_is_off_by_one_bit_is_named(fleet: Fleet) -> None:
    with fleet.one_bit_off() as node:
        code, run = fleet.diagnose("--suite", "on-failure")
    assert accused(run) == ([node], []), json.dumps(run, indent=1)
    assert code == 1
    (finding,) = (found for found in run["findings"] if found["verdict"] == "fail")
    assert (finding["node"], finding["test"]) == (node, "compute")
    assert finding["threshold_source"] == "peers"
    # Compared with itself it is fine: it is wrong in the same way each time.
    alone = [f for f in run["findings"] if f["metric"] == "differing_elements"]
    assert {found["verdict"] for found in alone} == {"pass"}


def test_runs_are_kept_over_a_restart_of_the_controller(fleet: Fleet) -> None:
    _, run = fleet.diagnose("--nodes", "n0,n1")
    fleet.restart_controller()
    listed = json.loads(fleet.outlast("diagnose", "--list", "--json").stdout)["runs"]
    assert listed[0]["run_id"] == run["run_id"]
    shown = json.loads(fleet.outlast("diagnose", "--show", run["run_id"], "--json").stdout)["run"]
    assert shown == run
    text = fleet.outlast("diagnose", "--show", run["run_id"]).stdout
    assert "n0--n1" in text
    assert "nothing failed" in text
