"""Which nodes keep the copies of a job's host memory, by where they stand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from checkpoint.core.placement import place_replicas
from checkpoint.replicas.placing import partner_node_indexes
from controller.core.capacity import Capacity
from controller.core.copies import partner_indexes
from controller.core.node_events import NodeJoined
from controller.core.starts import start_on
from outlast.ids import NodeId
from outlast.layout import Layout
from tests.controller.core.driver import JOB, Driver, make_plan

_NEXT = ((1,), (2,), (3,), (0,))


def _joined(racks: Sequence[str], *, host_memory_bytes: int = 0) -> Driver:
    driver = Driver()
    for number, rack in enumerate(racks, start=1):
        _join(driver, f"n{number}", rack, host_memory_bytes=host_memory_bytes)
    return driver


def _join(driver: Driver, node: str, rack: str, *, host_memory_bytes: int = 0) -> None:
    driver.send(
        NodeJoined(
            node=NodeId(node),
            incarnation="one",
            address=f"{node}.example",
            rendezvous_port=4242,
            workers=1,
            statuses=(),
            replica_port=7000,
            capacity=Capacity(
                topology=rack and f"block/{rack}", host_memory_bytes=host_memory_bytes
            ),
        )
    )


def _submit(driver: Driver, *, any_shift_bytes: int = 0) -> None:
    driver.submit(
        nodes=4,
        replica_node_indexes=_NEXT,
        replica_shift=1,
        any_shift_bytes=any_shift_bytes,
    )
    driver.answer_all("/suite/")
    driver.answer_all("/start/")
    driver.advanced(1)


def _keepers(driver: Driver) -> dict[str, str]:
    """By node, the one that keeps its copies, which its order to start names last."""
    state = driver.machine.state
    attempt = state.attempts[JOB]
    return {node: start_on(state, attempt, node).replica_peers[-1].node for node in attempt.nodes}


def test_copies_leave_the_rack() -> None:
    driver = _joined("aabb")
    _submit(driver)
    assert driver.machine.state.attempts[JOB].replica_shift == 2
    assert _keepers(driver) == {"n1": "n3", "n2": "n4", "n3": "n1", "n4": "n2"}


def test_where_nobody_says_how_nodes_stand_the_layout_decides() -> None:
    driver = _joined(("",) * 4)
    _submit(driver)
    assert driver.machine.state.attempts[JOB].replica_shift == 0
    assert _keepers(driver) == {"n1": "n2", "n2": "n3", "n3": "n4", "n4": "n1"}


def test_copies_stay_where_they_are_while_somebody_may_need_them() -> None:
    """The node that takes n1's place asks the one that kept n1's copies."""
    driver = _joined("aabb")
    _submit(driver)
    _join(driver, "n5", "b")
    driver.lose("n1")
    driver.answer_all("/stop/")
    driver.answer_all("/suite/")
    # Now three nodes stand in one rack, and another shift would be as good.
    assert driver.job().nodes == ("n5", "n2", "n3", "n4")
    assert _keepers(driver)["n5"] == "n3"


def test_a_job_whose_nodes_are_all_new_looks_again() -> None:
    driver = _joined("abab")
    _submit(driver)
    assert driver.job().nodes == ("n1", "n3", "n2", "n4")
    for number, rack in enumerate("cddc", start=5):
        _join(driver, f"n{number}", rack)
    for node in ("n1", "n2", "n3", "n4"):
        driver.lose(node)
    driver.answer_all("/stop/")
    driver.answer_all("/suite/")
    racks = {"n5": "c", "n6": "d", "n7": "d", "n8": "c"}
    assert all(racks[node] != racks[keeper] for node, keeper in _keepers(driver).items())


def test_a_node_without_room_for_larger_copies_keeps_those_of_the_layout() -> None:
    for most, shift in ((100, 2), (99, 0), (0, 2)):
        driver = _joined("aabb", host_memory_bytes=most)
        _submit(driver, any_shift_bytes=100)
        assert driver.machine.state.attempts[JOB].replica_shift == shift


def test_a_node_with_too_little_memory_for_the_shift_of_before_gets_the_layout_s() -> None:
    driver = _joined("aabb", host_memory_bytes=100)
    _submit(driver, any_shift_bytes=100)
    assert driver.machine.state.attempts[JOB].replica_shift == 2
    _join(driver, "n5", "a", host_memory_bytes=99)
    driver.lose("n1")
    driver.answer_all("/stop/")
    driver.answer_all("/suite/")
    assert driver.job().nodes[0] == "n5"
    assert driver.machine.state.attempts[JOB].replica_shift == 0


@pytest.mark.parametrize("shift", range(1, 6))
def test_a_node_is_told_of_all_that_have_its_state_whatever_the_shift(shift: int) -> None:
    """Some of its ranks have twins, others copies: the pair of node and holder has both."""
    layout = Layout(tp=2, pp=8, dp=3)
    names = [str(rank // 8) for rank in range(layout.world_size)]
    planned = place_replicas(layout, names, dp_is_sharded=False)
    plan = make_plan(
        nodes=6,
        workers_per_node=8,
        replica_node_indexes=partner_node_indexes(planned, 8),
        replica_shift=planned.shift,
    )
    moved = place_replicas(layout, names, dp_is_sharded=False, shift=shift)
    needed = partner_node_indexes(moved, 8)
    for index in range(6):
        assert set(needed[index]) <= set(partner_indexes(plan, shift, index))
