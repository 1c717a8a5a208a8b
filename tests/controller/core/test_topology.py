"""Which free nodes a job gets, by where they stand."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from controller.core.capacity import Capacity
from controller.core.node_events import NodeJoined, NodeLocated
from controller.core.settings import Settings
from controller.core.states import NodeState
from controller.core.topology import Path, Standing, choose, compact, of_labels, parsed
from outlast.ids import NodeId
from tests.controller.core.driver import Driver

_PATHS = st.lists(st.sampled_from("abc"), max_size=3).map(tuple)


@st.composite
def standing(draw: st.DrawFn) -> list[Standing]:
    paths = draw(st.lists(_PATHS, max_size=24))
    return [(NodeId(f"n{number:02}"), path) for number, path in enumerate(paths)]


@given(nodes=standing(), count=st.integers(1, 24))
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
    sizes = Counter(path[:depth] for _, path in nodes for depth in range(1, len(path) + 1))
    with_room = [path for path, size in sizes.items() if size >= count]
    if with_room:
        innermost = max(map(len, with_room))
        smallest = min(sizes[path] for path in with_room if len(path) == innermost)
        (within,) = {paths[node][:innermost] for node in chosen}
        assert sizes[within] == smallest
    else:
        first = Counter(_domain(path, 1) for _, path in nodes)
        used = {_domain(paths[node], 1) for node in chosen}
        assert len(used) == _fewest([*first.values()], len(chosen))


def test_a_rack_with_room_is_better_than_a_smaller_block_without() -> None:
    racks = [(NodeId(f"a{rack}"), ("block-a", f"rack-{rack}")) for rack in range(5)]
    rack = [(NodeId(f"b{number}"), ("block-b", "rack")) for number in range(8)]
    assert compact([*racks, *rack], 4) == ["b0", "b1", "b2", "b3"]


@given(first=standing(), then=standing(), wanted=st.lists(_PATHS, max_size=8))
def test_places_get_the_nearest_of_the_first_class(
    first: list[Standing], then: list[Standing], wanted: list[Path]
) -> None:
    others = [(NodeId(f"other-{node}"), path) for node, path in then]
    chosen = choose(wanted, [first, others])
    found = [node for node in chosen if node is not None]
    assert len(set(found)) == len(found) == min(len(wanted), len(first) + len(others))
    paths = dict([*first, *others])
    assert sum(node in dict(first) for node in found) == min(len(wanted), len(first))
    if wanted and first:
        # Those that are wanted at the same place as the first are around it, and as near as
        # so many can be.
        path = wanted[0]
        alike = [node for node, own in zip(chosen, wanted, strict=True) if own == path]
        near = [node for node in alike if node in dict(first)]
        shared = min(_shared(paths[node], path) for node in near if node is not None)
        closer = [own for _, own in first if _shared(own, path) > shared]
        assert len(closer) < len(near)


def test_places_of_a_rack_that_is_lost_are_filled_from_one_rack() -> None:
    free = [(NodeId(f"n{number}"), ("block", f"rack-{number % 4}")) for number in range(12)]
    lost: list[Path] = [("block", "rack-9")] * 3
    found = choose(lost, [free])
    assert len({dict(free)[node][1] for node in found if node is not None}) == 1


def test_without_paths_nodes_are_taken_in_their_order() -> None:
    nodes = [(NodeId(name), ()) for name in ("c", "a", "b")]
    assert compact(nodes, 2) == ["c", "a"]
    assert choose([("rack-1",), ()], [[], nodes]) == ["c", "a"]
    assert choose([()], []) == [None]


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


def test_a_job_that_has_lost_all_nodes_takes_a_checked_standby() -> None:
    driver = Driver()
    for node, rack in (("n1", "a"), ("n2", "b"), ("n3", "b")):
        _join(driver, node, f"block/{rack}")
    driver.submit(nodes=1, standby=1)
    assert driver.job().nodes == ("n1",)
    driver.answer_all("/suite/")
    driver.answer_all("/start/")
    driver.advanced(1)
    driver.answer_all("/suite/")
    (standby,) = (node for node in ("n2", "n3") if driver.node(node).state is NodeState.STANDBY)
    _join(driver, "n0", "block/a")
    driver.lose("n1")
    driver.answer_all("/stop/")
    assert driver.job().nodes == (standby,)


def test_a_host_that_has_gone_is_known_to_have_stood_where_it_did() -> None:
    driver = Driver(settings=Settings(brings_nodes=True))
    driver.send(NodeLocated(node=NodeId("n1"), topology="zone-1/rack-1"))
    _join(driver, "n1", "")
    driver.lose("n1")
    driver.send(NodeLocated(node=NodeId("n1"), topology=""))
    assert driver.node("n1").path == ("zone-1", "rack-1")
    # A controller that starts hears agents first, and then of hosts.
    again = Driver(driver.machine.state, Settings(brings_nodes=True))
    _join(again, "n1", "", incarnation="two")
    assert again.node("n1").path == ("zone-1", "rack-1")


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
