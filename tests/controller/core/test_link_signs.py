"""A link in trouble tells one node from others that a hang or a slowdown makes look alike."""

from __future__ import annotations

from controller.core import events as ev
from controller.core.kinds import Cause, EvidenceKind
from controller.core.states import JobState
from outlast.ids import NodeId
from tests.controller.core.driver import JOB, Driver

STARVED = "rail1 carries less than it did (3.1 MB/s)"


def _found(driver: Driver, cause: Cause, node: str | None, **changes: bool) -> ev.Detected:
    return ev.Detected(
        job_id=JOB,
        attempt=driver.attempt(),
        cause=cause,
        node=None if node is None else NodeId(node),
        rank=None,
        detail=STARVED if cause is Cause.TRAFFIC else "steps take 1.5 times as long",
        at_s=driver.now_s,
        **changes,
    )


def _stalled(driver: Driver, *ranks: int, are_alike: bool) -> ev.JobStalled:
    return ev.JobStalled(
        job_id=JOB,
        attempt=driver.attempt(),
        stalled_s=30.0,
        culprit_ranks=ranks,
        detail="what ranks do",
        limit="at most 9.0 s",
        are_alike=are_alike,
    )


def _blamed(driver: Driver) -> dict[str | None, str]:
    """Nodes that the hang is held against, and what is said of each."""
    evidence = driver.incident(driver.job().num_incidents).evidence
    return {item.node: item.detail for item in evidence if item.kind is EvidenceKind.STALLED}


def _with_trouble_of(node: str) -> Driver:
    driver = Driver().running()
    assert driver.send(_found(driver, Cause.TRAFFIC, node)) == ["job.i1 OPEN"]
    return driver


def test_of_ranks_that_are_alike_the_one_whose_link_is_in_trouble_is_blamed() -> None:
    driver = _with_trouble_of("n2")
    driver.send(_stalled(driver, 0, 1, are_alike=True))
    blamed = _blamed(driver)
    assert [*blamed] == ["n2"]
    assert blamed["n2"].endswith(f"what ranks do; on n2: {STARVED}")
    driver.answer_all("/stop/")
    assert driver.incident(2).culprits == ("n2",)


def test_without_such_a_link_all_of_them_are() -> None:
    driver = Driver().running()
    driver.send(_stalled(driver, 0, 1, are_alike=True))
    assert [*_blamed(driver)] == ["n1", "n2"]


def test_a_rank_that_is_known_to_hold_the_others_up_stays_the_culprit() -> None:
    driver = _with_trouble_of("n2")
    driver.send(_stalled(driver, 0, are_alike=False))
    assert [*_blamed(driver)] == ["n1"]


def test_where_no_rank_is_named_the_link_is_told_of() -> None:
    driver = _with_trouble_of("n2")
    driver.send(_stalled(driver, are_alike=False))
    assert _blamed(driver) == {
        None: f"stood still for 30.0 s (at most 9.0 s); what ranks do; on n2: {STARVED}"
    }


def test_trouble_that_is_over_says_nothing() -> None:
    driver = _with_trouble_of("n2")
    over = ev.DetectionEnded(job_id=JOB, cause=Cause.TRAFFIC, node=NodeId("n2"), detail="over")
    assert driver.send(over) == ["job.i1 CLOSED"]
    driver.send(_stalled(driver, 0, 1, are_alike=True))
    assert [*_blamed(driver)] == ["n1", "n2"]


def test_a_slowdown_of_all_tells_of_the_link_and_is_of_no_node() -> None:
    driver = _with_trouble_of("n2")
    driver.send(_found(driver, Cause.SLOWDOWN, None, acts=True))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.DIAGNOSING
    first = driver.incident(2).evidence[0]
    assert first.node is None
    assert first.detail.endswith(f"1.5 times as long; on n2: {STARVED}")
