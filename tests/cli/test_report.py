"""The report: its figures, its page and its drawings, from recorded data."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo import page, summary, svg
from demo.analysis import Injected, Phase, Step
from demo.scenario import Recorded
from outlast.cli.pages import plot
from outlast.spec.parse import parse_spec
from tests.cli.recorded import NODE_FAULT, START_S, WORKER_FAULT, curve, incident

SPEC = parse_spec({"name": "tiny", "steps": 20})
REPORT_KEYS = {
    *("loss_identical", "first_difference", "faults", "ettr", "steps", "losses_sha256"),
    *("final_loss", "eval_losses", "versions", "machine", "seed"),
}
FAULT_KEYS = {
    *("kind", "injected_at_s", "step", "victim", "detection_s", "diagnosis", "verdict", "cause"),
    *("recovery_s", "steps_redone", "incident_id", "timeline"),
}


def recorded(
    steps: list[Step], *, faults: tuple[Injected, ...] = (), state: str = "SUCCEEDED"
) -> Recorded:
    return Recorded(
        job={
            "job_id": "tiny-abcde",
            "state": state,
            "finished_s": START_S + 30.0,
            "restarts": len(faults),
        },
        reports=tuple(steps),
        curve=tuple(steps),
        incidents=tuple(incident(n, fault) for n, fault in enumerate(faults, 1)),
        faults=faults,
    )


def report_of(broken: Recorded, whole: Recorded) -> dict[str, Any]:
    return summary.build(SPEC, 7, broken, whole)


@pytest.fixture
def report() -> dict[str, Any]:
    return report_of(recorded(curve(20), faults=(WORKER_FAULT, NODE_FAULT)), recorded(curve(20)))


def test_good_run_passes_with_every_key(report: dict[str, Any]) -> None:
    assert report["passed"]
    assert report["loss_identical"] is True
    assert set(report) >= REPORT_KEYS
    assert all(set(fault) >= FAULT_KEYS for fault in report["faults"])
    assert report["eval_losses"] == [[step, 4.0] for step in (4, 8, 12, 16, 20)]
    assert report["final_loss"] == pytest.approx(5.0 / 20 + 0.1)
    assert report["losses_sha256"] == report["fault_free"]["losses_sha256"]


def test_different_losses_fail_the_demo() -> None:
    odd = [replace(s, loss=s.loss + 1e-12) if s.step == 12 else s for s in curve(20)]
    report = report_of(recorded(odd, faults=(WORKER_FAULT, NODE_FAULT)), recorded(curve(20)))
    assert not report["passed"]
    assert report["loss_identical"] is False
    assert report["first_difference"]["step"] == 12
    assert "differ from step 12" in report["outcome"]


def test_fault_that_was_not_noticed_fails_the_demo() -> None:
    broken = replace(recorded(curve(20), faults=(WORKER_FAULT, NODE_FAULT)), incidents=())
    report = report_of(broken, recorded(curve(20)))
    assert not report["passed"]
    assert "nobody noticed" in report["outcome"]


def test_fault_that_was_not_injected_fails_the_demo() -> None:
    report = report_of(recorded(curve(20), faults=(WORKER_FAULT,)), recorded(curve(20)))
    assert not report["passed"]
    assert "only 1 of 2 faults" in report["outcome"]


def test_job_that_failed_fails_the_demo_and_still_makes_a_report(tmp_path: Path) -> None:
    report = report_of(recorded([], state="FAILED"), recorded([], state="CANCELLED"))
    assert not report["passed"]
    assert "ended FAILED" in report["outcome"]
    summary.save(report, tmp_path)


def test_files_are_written_and_the_page_stands_alone(
    report: dict[str, Any], tmp_path: Path
) -> None:
    as_json, as_page = summary.save(report, tmp_path / "new")
    assert json.loads(as_json.read_text()) == report
    html = as_page.read_text()
    # Nothing is loaded from anywhere, and nothing is left to fill in.
    assert not re.search(r'(src|href)="|url\(|@import|\$\w', html)
    assert html.count("<svg") == 3
    for word in ("ETTR", "worker killed", "node lost", "tiny-abcde.i1", "fork 0.010 s"):
        assert word in html


def test_text_from_outside_is_escaped(report: dict[str, Any]) -> None:
    html = page.render(report)
    assert "because of node-1 &lt;&amp;&gt;" in html
    assert "<&>" not in html


def test_summary_is_printed(report: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    summary.print_summary(report, (Path("a/report.json"), Path("a/report.html")))
    printed = capsys.readouterr().out
    assert "Identical: all 20 losses" in printed
    assert "0.25 s" in printed
    assert "a/report.html" in printed


def test_points_fill_the_frame() -> None:
    frame = plot.Frame(
        x_min=0, x_max=10, y_min=0, y_max=1, width=110, height=110, left=5, right=5, top=5, bottom=5
    )
    assert plot.polyline([(0, 0), (5, 0.5), (10, 1)], frame) == "5.0,105.0 55.0,55.0 105.0,5.0"


def test_values_that_are_not_finite_leave_no_mark() -> None:
    frame = plot.Frame(x_min=0, x_max=1, y_min=0, y_max=1)
    assert plot.polyline([(0, math.nan), (1, math.inf)], frame) == ""


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.5, 3.2, [1, 2, 3]),
        (1, 300, [50, 100, 150, 200, 250, 300]),
        (2, 2, [2]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert plot.ticks(low, high, 5 if high < 300 else 8) == expected


@pytest.mark.parametrize(
    "drawing",
    [
        svg.loss_curve([(1, 5.0), (2, 4.0)], [(1, 5.0)], [(2, 4.5)], [(1, "a <b>")]),
        svg.loss_curve([], [], [], []),
        svg.loss_curve([(1, 3.0)], [(1, 3.0)], [], []),
        svg.timeline([]),
        svg.timeline([Phase(name="x & y", start_s=0.0, duration_s=2.0, detail="<d>")], end_s=1.0),
    ],
)
def test_drawings_are_well_formed(drawing: str) -> None:
    assert ET.fromstring(drawing).tag == "svg"


def test_timeline_stops_where_training_goes_on() -> None:
    phases = [
        Phase(name="stopping", start_s=0.0, duration_s=1.0, detail=""),
        Phase(name="first_step", start_s=1.0, duration_s=9.0, detail=""),
    ]
    drawn = svg.timeline(phases, end_s=1.0)
    assert "stopping" in drawn
    assert "first_step" not in drawn
