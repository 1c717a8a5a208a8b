"""Which free nodes a job gets, by where they stand."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from controller.core.capacity import Capacity
from controller.core.node_events import NodeJoined, NodeLocated
from controller.core.states import NodeState
from controller.core.topology import Nearest, Path, Standing, compact, of_labels, parsed
from outlast.ids import NodeId
from tests.controller.core.driver import Driver

_PATHS = st.lists(st.sampled_from("abc"), max_size=3).map(tuple)


@st.composite
def standing(draw: st.DrawFn) -> list[Standing]:
    paths = draw(st.lists(_PATHS, max_size=24))
    return [(NodeId(f"n{number:02}"), path) for number, path in enumerate(paths)]


@given(nodes=standing(), count=st.integers(0, 24))
def test_a_job_gets_as_few_and_as_small_domains_as_can_be(
    nodes: list[Standing], count: int
) -> None:
    chosen = compact(nodes, count)
    assert len(set(chosen)) == len(chosen) == min(count, len(nodes))
    paths = dict(nodes)
    for depth in (1, 2, 3):
        taken = [_domain(paths[node], depth) for node in chosen]
        # Each of them in a row: ranks that follow each other are near.
        assert len(_runs(taken)) == len(set(taken))
    first = Counter(_domain(path, 1) for _, path in nodes)
    used = Counter(_domain(paths[node], 1) for node in chosen)
    assert len(used) == _fewest([*first.values()], len(chosen))
    if len(used) == 1:
        (domain,) = used
        # No smaller one would have done.
        assert all(size >= first[domain] for size in first.values() if size >= len(chosen))


@given(first=standing(), then=standing(), near=st.lists(_PATHS, max_size=8))
def test_a_place_gets_the_nearest_of_the_first_that_are_left(
    first: list[Standing], then: list[Standing], near: list[Path]
) -> None:
    others = [(NodeId(f"other-{node}"), path) for node, path in then]
    nearest, left = Nearest([first, others]), [first[:], others[:]]
    for path in near:
        chosen = nearest.take(path)
        of_class = next((each for each in left if each), None)
        if of_class is None:
            assert chosen is None
            continue
        best = max(_shared(each, path) for _, each in of_class)
        # Of several that are as near the one that comes first.
        expected = next(node for node, each in of_class if _shared(each, path) == best)
        assert chosen == expected
        of_class[:] = [each for each in of_class if each[0] != chosen]


def test_without_paths_nodes_are_taken_in_their_order() -> None:
    nodes = [(NodeId(name), ()) for name in ("c", "a", "b")]
    assert compact(nodes, 2) == ["c", "a"]
    assert Nearest([[], nodes]).take(("rack-1",)) == "c"


def test_a_path_is_read_as_people_write_it() -> None:
    assert parsed("block-1/rack-7") == ("block-1", "rack-7")
    assert parsed("/block-1//") == ("block-1",)
    assert parsed("") == ()
    assert len(parsed("/".join("abcdefghijkl"))) == 8
    labels = {"zone": "eu/1", "rack": "r7", "host": "h"}
    assert of_labels(labels, ["zone", "rack"]) == "eu-1/r7"
    assert of_labels(labels, ["zone", "block", "rack"]) == "eu-1"
    assert of_labels(labels, []) == ""


def test_a_job_starts_within_one_rack_though_names_say_otherwise() -> None:
    driver = Driver()
    for node, rack in (("n1", "a"), ("n2", "b"), ("n3", "a"), ("n4", "b"), ("n5", "b")):
        _join(driver, node, f"block/{rack}")
    driver.submit(nodes=2)
    # The smallest that has room.
    assert driver.job().nodes == ("n1", "n3")


def test_a_lost_node_is_replaced_by_the_nearest() -> None:
    driver = Driver()
    for node, rack in (("n1", "a"), ("n2", "a"), ("n3", "b"), ("n4", "b"), ("n5", "a")):
        _join(driver, node, f"block/{rack}")
    driver.submit(nodes=2, standby=0)
    assert driver.job().nodes == ("n3", "n4")
    _join(driver, "n6", "block/b")
    driver.answer_all("/suite/")
    driver.answer_all("/start/")
    driver.advanced(1)
    driver.lose("n3")
    driver.answer_all("/stop/")
    assert driver.job().nodes == ("n6", "n4")


def test_a_checked_standby_comes_before_a_nearer_node() -> None:
    driver = Driver()
    for node, rack in (("n1", "a"), ("n2", "a"), ("n3", "b")):
        _join(driver, node, f"block/{rack}")
    driver.submit(nodes=2, standby=1)
    assert driver.job().nodes == ("n1", "n2")
    driver.answer_all("/suite/")
    driver.answer_all("/start/")
    driver.advanced(1)
    driver.answer_all("/suite/")
    assert driver.node("n3").state is NodeState.STANDBY
    _join(driver, "n4", "block/a")
    driver.lose("n1")
    driver.answer_all("/stop/")
    assert driver.job().nodes == ("n3", "n2")


def test_the_cluster_says_where_hosts_stand_before_or_after_they_join() -> None:
    driver = Driver()
    driver.send(NodeLocated(node=NodeId("n1"), topology="zone-1/rack-1"))
    _join(driver, "n1", "")
    _join(driver, "n2", "said/by/its/agent")
    assert driver.node("n1").path == ("zone-1", "rack-1")
    driver.send(NodeLocated(node=NodeId("n2"), topology="zone-1/rack-2"))
    assert driver.node("n2").path == ("zone-1", "rack-2")
    # An agent that comes back does not know it either.
    _join(driver, "n1", "", incarnation="two")
    assert driver.node("n1").path == ("zone-1", "rack-1")


def _join(driver: Driver, node: str, topology: str, incarnation: str = "one") -> None:
    driver.send(
        NodeJoined(
            node=NodeId(node),
            incarnation=incarnation,
            address=f"{node}.example",
            rendezvous_port=4242,
            workers=1,
            statuses=(),
            capacity=Capacity(topology=topology),
        )
    )


def _domain(path: Path, depth: int) -> Path:
    """Those whose path ends before are a domain of their own."""
    return (*path[:depth], *[""] * (depth - len(path)))


def _runs(values: list[Path]) -> list[Path]:
    return [each for index, each in enumerate(values) if not index or values[index - 1] != each]


def _shared(one: Path, other: Path) -> int:
    number = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        number += 1
    return number


def _fewest(sizes: list[int], count: int) -> int:
    used = 0
    for size in sorted(sizes, reverse=True):
        if count <= 0:
            break
        count -= size
        used += 1
    return used
