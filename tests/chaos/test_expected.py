"""How the outcome of a row is judged."""

from __future__ import annotations

from dataclasses import replace

from tests.chaos.expected import Outcome, SeenIncident, expected, problems
from tests.chaos.matrix import Fault, LayoutName, Moment, Row, Victim

ROW = Row(Fault.KILLED, Moment.STEADY, LayoutName.DP2, Victim.LAST)
INCIDENT = SeenIncident(
    cause="worker_killed",
    action="restart_in_place",
    reason="rank 1 on node-1 failed",
    culprits=("node-1",),
    detection_s=0.1,
    recovery_s=0.5,
    steps_redone=1,
)
GOOD = Outcome(
    state="SUCCEEDED",
    reason="",
    attempts=2,
    struck_node="node-1",
    incidents=(INCIDENT,),
    losses_equal=True,
    first_difference=None,
    wall_s=10.0,
)


def found(row: Row, outcome: Outcome) -> str:
    return "; ".join(problems(expected(row), outcome))


def test_a_fault_that_was_found_and_survived_passes() -> None:
    assert found(ROW, GOOD) == ""


def test_a_job_that_fails_or_another_curve_is_a_problem() -> None:
    assert "ended FAILED: why" in found(ROW, replace(GOOD, state="FAILED", reason="why"))
    changed = replace(GOOD, losses_equal=False, first_difference=31)
    assert "losses differ from step 31" in found(ROW, changed)


def test_a_fault_that_nobody_noticed_is_a_problem() -> None:
    assert "not detected" in found(ROW, replace(GOOD, incidents=()))


def test_the_wrong_node_is_a_problem_and_so_is_one_too_many() -> None:
    for blamed in (("node-0",), ("node-0", "node-1"), ()):
        outcome = replace(GOOD, incidents=(replace(INCIDENT, culprits=blamed),))
        assert "node-1 was struck, blamed" in found(ROW, outcome)


def test_another_cause_or_action_or_too_much_redone_is_a_problem() -> None:
    other = replace(GOOD, incidents=(INCIDENT, replace(INCIDENT, cause="node_lost")))
    assert "unexpected incident: node_lost" in found(ROW, other)
    dear = replace(GOOD, incidents=(replace(INCIDENT, action="replace_nodes"),))
    assert "unexpected action: replace_nodes" in found(ROW, dear)
    long = replace(GOOD, incidents=(replace(INCIDENT, steps_redone=20),))
    assert "20 steps redone" in found(ROW, long)


def test_what_is_no_fault_of_the_job_must_leave_no_incident() -> None:
    row = Row(Fault.CLOCK, Moment.STEADY, LayoutName.DP2, Victim.LAST)
    assert found(row, replace(GOOD, incidents=())) == ""
    assert "unexpected incident: worker_killed" in found(row, GOOD)


def test_step_of_a_clock_is_no_incident_and_the_job_that_follows_must_be_well() -> None:
    row = Row(Fault.OWN_CLOCK_DAY, Moment.START, LayoutName.DP2, Victim.NOBODY)
    assert found(row, replace(GOOD, incidents=())) == ""
    paused = replace(INCIDENT, cause="storage", action="pause", culprits=())
    assert "unexpected incident: storage" in found(row, replace(GOOD, incidents=(paused,)))
    # There the store is taken away, so that a deadline has to come.
    row = replace(row, moment=Moment.STEADY)
    assert found(row, replace(GOOD, incidents=(paused,))) == ""
    assert "not detected" in found(row, replace(GOOD, incidents=()))


def test_bad_reports_blame_nobody() -> None:
    row = Row(Fault.POISON, Moment.STEADY, LayoutName.DP2, Victim.LAST)
    assert found(row, replace(GOOD, incidents=())) == ""
    assert "unexpected incident: worker_killed" in found(row, GOOD)


def test_the_second_fault_of_a_row_may_have_its_own_incident() -> None:
    row = replace(ROW, fault=Fault.CONTROLLER, moment=Moment.RECOVERY, victim=Victim.NOBODY)
    assert found(row, GOOD) == ""


def test_what_is_left_after_the_end_is_a_problem() -> None:
    assert "processes left: [7]" in found(ROW, replace(GOOD, trouble=("processes left: [7]",)))


def test_a_rank_that_starves_on_must_be_told_and_named_and_one_that_did_for_a_moment_need_not() -> (
    None
):
    row = Row(Fault.STARVED, Moment.STEADY, LayoutName.DP2, Victim.LAST)
    told = replace(INCIDENT, cause="straggler", action="")
    assert found(row, replace(GOOD, incidents=(told,))) == ""
    assert "not detected" in found(row, replace(GOOD, incidents=()))
    other = replace(told, culprits=("node-0",))
    assert "node-1 was struck, blamed: node-0" in found(row, replace(GOOD, incidents=(other,)))
    assert found(replace(row, moment=Moment.UPLOAD), replace(GOOD, incidents=())) == ""


def test_a_deadlock_is_the_program_s_mistake() -> None:
    row = Row(Fault.DEADLOCK, Moment.STEADY, LayoutName.PP2, Victim.LAST)
    mistake = replace(INCIDENT, cause="user_error", culprits=())
    assert found(row, replace(GOOD, incidents=(mistake,))) == ""
    hang = replace(mistake, cause="hang", culprits=("node-0", "node-1"))
    assert "unexpected incident: hang" in found(row, replace(GOOD, incidents=(hang,)))
