"""Incidents in words: each thing once, notes with their count, and lines that fit."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.cli import describe, describe_incident, output
from outlast.v1 import common_pb2, incidents_pb2, jobs_pb2

NOW_S = 1_000.0
KILLED = "killed by SIGKILL (in pp recv #174)"


def killed() -> incidents_pb2.Incident:
    """As a controller told it when a worker was killed."""
    timeline = (
        ("fault", 0.0, KILLED),
        ("detected", 0.01, ""),
        ("suspending", 0.01, f"stopping workers: {KILLED}"),
        ("verdict", 0.1, f"rank 2 on node-1 failed: {KILLED}; restarting processes in place"),
        ("starting", 0.1, "restarting in place"),
        ("first_step", 1.2, "model 0.039 s, groups 0.110 s, restore 0.241 s, fork 0.021 s"),
        ("closed", 1.2, "training is past step 48 again"),
    )
    return incidents_pb2.Incident(
        incident_id="gpt-tiny-c3vvg.i1",
        state="CLOSED",
        cause="worker_killed",
        action="restart_in_place",
        reason=f"rank 2 on node-1 failed: {KILLED}; restarting processes in place",
        culprit_nodes=["node-1"],
        evidence=[
            incidents_pb2.Evidence(kind="worker_exit", node="node-1", rank=2, detail=KILLED),
            incidents_pb2.Evidence(
                kind="worker_exit", node="node-0", rank=1, detail="connection closed by peer"
            ),
        ],
        timeline=[
            common_pb2.TimelineEntry(phase=phase, at_s=at_s, detail=detail)
            for phase, at_s, detail in timeline
        ],
        recovery_s=1.2,
        steps_redone=0,
        count=1,
    )


def spiking(**changes: Any) -> incidents_pb2.Incident:
    signs = [
        incidents_pb2.Evidence(kind="detected", detail=f"step {step}: gradient norm 9")
        for step in range(10, 20)
    ]
    facts: dict[str, Any] = {
        "incident_id": "gpt-tiny-c3vvg.i2",
        "state": "OPEN",
        "cause": "spike",
        "reason": "step 10: gradient norm 9; training goes on",
        "evidence": signs,
        "count": 105,
        "last_s": NOW_S - 12,
        "is_note": True,
    }
    return incidents_pb2.Incident(**facts | changes)


def test_an_incident_says_each_thing_once() -> None:
    lines = describe_incident.incident_lines(killed(), NOW_S)
    text = "\n".join(f"{label} {line}" for label, line in lines)
    assert text.count("SIGKILL") == 1
    assert text.count("restarting processes in place") == 1
    assert [line for label, line in lines if label == "evidence"] == [
        "node-0 rank 1: connection closed by peer"
    ]
    assert "+   0.010 s  suspending    stopping workers" in text
    assert "restore 0.241 s" in text
    assert text.count("node-1") == 1


def test_status_does_not_repeat_the_reason_of_its_incident() -> None:
    incident = killed()
    lines = describe_incident.incident_lines(incident, NOW_S, said=incident.reason)
    assert "SIGKILL" not in "\n".join(line for _, line in lines)


def test_a_note_says_how_often_and_that_nothing_is_to_be_done() -> None:
    lines = describe_incident.incident_lines(spiking(), NOW_S)
    facts = dict(lines)
    assert facts["action"] == "only logged"
    assert facts["seen"] == "105 times, last 12.0 s ago"
    assert facts["cost"] == "none: training went on"
    signs = [line for label, line in lines if label == "evidence"]
    assert signs[-2:] == ["step 19: gradient norm 9", "and 5 more (all: --json)"]
    assert describe_incident.summary(spiking(), NOW_S) == (
        "only logged, seen 105 times, last 12.0 s ago"
    )
    once = spiking(count=1, last_s=None)
    assert describe_incident.summary(once, NOW_S) == "only logged"


def test_notes_are_not_counted_as_incidents() -> None:
    assert describe_incident.count([]) == "0 incidents"
    assert describe_incident.count([killed(), spiking()]) == "1 incident and 1 note"


@pytest.mark.parametrize("columns", [80, 60])
def test_an_incident_fits_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    output.print_lines(describe_incident.incident_lines(killed(), NOW_S))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    joined = " ".join(shown.split())
    assert "training is past step 48 again" in joined
    monkeypatch.delenv("COLUMNS")
    output.print_lines(describe_incident.incident_lines(killed(), NOW_S))
    # A pipe gets whole lines.
    assert f"because     {killed().reason}\n" in capsys.readouterr().out


def test_tables_wrap_their_last_column_or_put_it_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    reason = "waiting for 4 nodes of 2 workers; 3 are connected, and one is quarantined since noon"
    header = ("JOB", "STATE", "EMPTY", "REASON")
    output.print_table(header, [("a", "QUEUED", "", reason)], empty="")
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    assert shown[0] == "JOB  STATE   REASON"
    assert shown[2].startswith(" " * 13)
    name = "a-name-as-long-as-a-name-may-be-a-name-as-long-as-it-may-be-63x"
    output.print_table(header, [(name, "QUEUED", "", reason)], empty="")
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    assert shown[2].startswith(f"{name}  QUEUED")
    assert shown[3].startswith("    waiting for")


def test_a_job_that_waits_for_nodes_has_no_empty_places_in_its_list() -> None:
    job = jobs_pb2.Job(state="REPAIRING", nodes=["node-0", "", "node-2"])
    assert describe.job_nodes(job) == "node-0, node-2; 1 more needed"
    job.nodes[:] = ["", ""]
    assert describe.job_nodes(job) == "none; 2 more needed"
    job.state = "CANCELLED"
    assert describe.job_nodes(job) == "none"


def test_a_finished_job_is_not_behind() -> None:
    job = jobs_pb2.Job(state="RUNNING", step=50, committed_step=25)
    assert describe.checkpoint(job) == "step 25 is committed to storage, 25 steps behind"
    job.state = "SUCCEEDED"
    assert describe.checkpoint(job) == "step 25 is committed to storage"


def test_a_number_keeps_its_unit_when_a_line_is_wrapped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    output.print_lines([("step time", "data 0.0312 ms, forward 12.5 % of 144 s in all")])
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "step time   data 0.0312 ms, forward",
        "            12.5 % of 144 s in all",
    ]


def test_long_evidence_is_cut_and_not_told_again_in_the_timeline() -> None:
    long = "connection reset by peer; " + "check the logs " * 40
    incident = killed()
    incident.evidence[1].detail = long
    incident.timeline[0].detail = long
    lines = describe_incident.incident_lines(incident, NOW_S)
    assert max(len(line) for _, line in lines) < 200
    assert "\n".join(line for _, line in lines).count("reset by peer") == 1


def test_a_change_of_numerics_is_said_once_for_all_nodes() -> None:
    same = "learning_rate 0.1 is now 0.2"
    changes = [f"since step 7 (attempt 2): node-{n}: {same}" for n in range(2)]
    assert describe.numerics(
        [*changes, "since step 9 (attempt 3): node-1: torch 2.1 is now 2.2"]
    ) == [
        f"changed since step 7 (attempt 2): {same} (on node-0, node-1)",
        "changed since step 9 (attempt 3): torch 2.1 is now 2.2 (on node-1)",
    ]


def test_a_name_that_fills_the_terminal_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = ("n" * 60, "RUNNING", "12 min 30 s", "1,000/2,000", "training since step 1")
    output.print_table(("JOB", "STATE", "SINCE", "STEP", "REASON"), [row], empty="")
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "JOB",
        "  STATE    SINCE        STEP         REASON",
        "n" * 60,
        "  RUNNING  12 min 30 s  1,000/2,000  training since step 1",
    ]
