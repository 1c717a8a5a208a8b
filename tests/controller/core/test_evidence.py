"""What an incident keeps of its signs, and what its job makes of them."""

from __future__ import annotations

from dataclasses import replace

from controller.core.changes import State
from controller.core.evidence import MAX_ALIKE, MAX_TRACEBACKS, with_sign
from controller.core.incident_record import Evidence
from controller.core.kinds import EvidenceKind
from controller.core.node_events import NodeDisconnected, NodeJoined, NodeLate, NodeLost
from controller.core.states import JobState, NodeState
from controller.core.verdict import first_failure
from outlast.failures import FailureClass
from outlast.ids import NodeId
from tests.controller.core.driver import JOB, Driver


def sign(kind: EvidenceKind, number: int, **changes: object) -> Evidence:
    values: dict[str, object] = {"at_s": float(number), "detail": f"sign {number}", "rank": number}
    return Evidence(kind=kind, node=NodeId(f"n{number}"), **{**values, **changes})  # type: ignore[arg-type]


def gathered(signs: list[Evidence]) -> tuple[Evidence, ...]:
    evidence: tuple[Evidence, ...] = ()
    for item in signs:
        evidence = with_sign(evidence, item)
    return evidence


def cascades(count: int) -> list[Evidence]:
    return [
        sign(
            EvidenceKind.WORKER_EXIT,
            number,
            fault_class=FailureClass.CASCADE,
            traceback="T" * 16_000,
        )
        for number in range(count)
    ]


def test_a_thousand_lost_connections_leave_room_for_the_failure_behind_them() -> None:
    failure = sign(
        EvidenceKind.WORKER_EXIT, 2000, fault_class=FailureClass.OOM_HOST, traceback="why"
    )
    evidence = gathered([*cascades(1000), failure])
    assert len(evidence) == MAX_ALIKE + 1
    assert first_failure(evidence) == failure


def test_the_first_sign_of_each_node_that_decides_is_kept() -> None:
    lost = [sign(EvidenceKind.NODE_LOST, number) for number in range(100)]
    again = [sign(EvidenceKind.NODE_LOST, number, detail="again") for number in range(100)]
    assert gathered([*cascades(100), *lost, *again])[MAX_ALIKE:] == tuple(lost)


def test_stacks_of_a_rank_that_others_wait_for_are_kept_however_many_wait() -> None:
    waiting = [
        sign(EvidenceKind.STACKS, number, fingerprint="waits") for number in range(2, 2 * MAX_ALIKE)
    ]
    blamed = sign(EvidenceKind.STACKS, 1000, fingerprint="waits")
    odd = sign(EvidenceKind.STACKS, 1001, fingerprint="reads a file")
    evidence = gathered([sign(EvidenceKind.STALLED, 1000), *waiting, blamed, odd])
    assert evidence[-2:] == (blamed, odd)
    assert len(evidence) == 1 + MAX_ALIKE + 2
    every = [
        sign(EvidenceKind.STACKS, number, fingerprint=f"f{number}")
        for number in range(10 * MAX_ALIKE)
    ]
    assert len(gathered(every)) == 2 * MAX_ALIKE


def test_tracebacks_stay_with_the_first_failures_that_differ() -> None:
    failures = [
        sign(EvidenceKind.WORKER_EXIT, number, fingerprint=f"f{number % 9}", traceback=f"t{number}")
        for number in range(40, 0, -1)
    ]
    evidence = gathered([*cascades(20), *failures])
    kept = {item.traceback for item in evidence if item.traceback}
    assert kept == {f"t{number}" for number in range(1, MAX_TRACEBACKS + 1)}
    failure = first_failure(evidence)
    assert failure is not None
    assert failure.traceback == "t1"


def test_a_node_without_power_is_missed_whatever_the_others_cry() -> None:
    """10 nodes of 8 ranks: 72 ranks lose their connections before the node counts as lost."""
    driver = _ten_nodes()
    for rank in range(72):
        driver.send(driver.exited(rank, fault_class="cascade", detail="connection reset"))
    for number in range(9):
        driver.answer(f"job/a1/stop/m{number}")
    assert driver.job().state is JobState.SUSPENDING
    driver.send(NodeDisconnected(node=NodeId("m9")))
    driver.send(NodeLate(node=NodeId("m9"), silent_s=6.0))
    driver.send(NodeLost(node=NodeId("m9"), silent_s=15.0))
    assert driver.incident().culprits == ("m9",)
    assert driver.job().state is JobState.PROVISIONING
    assert None in driver.job().nodes


def test_a_job_restarts_only_on_nodes_that_it_still_holds() -> None:
    state: State = Driver().running().machine.state
    node = state.nodes[NodeId("n2")]
    job = state.jobs[JOB]
    state.nodes[NodeId("n2")] = replace(node, state=NodeState.RETIRED, job=None)
    state.jobs[JOB] = replace(job, state=JobState.RESTARTING)
    driver = Driver(state)
    driver.join("n1")
    lines = driver.join("n3")
    assert "job PROVISIONING a1" in lines or driver.job().state is JobState.PREFLIGHT
    assert driver.job().nodes == ("n1", "n3")
    assert not [line for line in lines if "/start/n2" in line]


def _ten_nodes() -> Driver:
    driver = Driver()
    for number in range(10):
        driver.send(
            NodeJoined(
                node=NodeId(f"m{number}"),
                incarnation="one",
                address=f"m{number}.example",
                rendezvous_port=4242,
                workers=8,
                statuses=(),
            )
        )
    driver.submit(nodes=10, workers_per_node=8)
    driver.answer_all("/suite/")
    driver.answer_all("/start/")
    driver.advanced(1)
    assert driver.job().state is JobState.RUNNING
    return driver
