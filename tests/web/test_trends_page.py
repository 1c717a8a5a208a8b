"""The section of weeks on a job's page: generated weeks, shown by the page of a live controller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from controller.convert import plan_of
from controller.core.records import JobRecord
from controller.core.states import JobState
from controller.rpc.trends import job_trends
from controller.web.messages import as_json
from diagnostics.core.history import history
from diagnostics.core.periods import periodic_stalls
from outlast.client import Client
from outlast.ids import JobId
from outlast.spec.parse import parse_spec
from outlast.v1 import trends_pb2
from tests.controller.processes import controller
from tests.diagnostics.test_periods import steps
from tests.diagnostics.test_trends import hours
from tests.web.browser import Visit, browser

SPEC = {
    "name": "weeks",
    "steps": 1000,
    "model": {"layers": 1, "hidden": 32, "heads": 2},
    "parallel": {"dp": 1},
    "resources": {"workers_per_node": 1},
}


def weeks(job_id: str) -> dict[str, Any]:
    """What the controller would answer of two weeks with a decline, a stall and a slow node."""
    spec = parse_spec(SPEC)
    job = JobRecord(
        job_id=JobId(job_id),
        name=spec.name,
        request_id="",
        spec_json=spec.canonical_json(),
        checkpoint_url="",
        plan=plan_of(spec),
        submitted_s=0.0,
        state=JobState.RUNNING,
        since_s=0.0,
        reason="",
    )
    stalls = periodic_stalls(steps(4_000, every=[(60, 2.0)]))
    message = job_trends(job, history(hours(336, seed=1, per_week=-0.08), stalls), {})
    message.nodes.append(
        trends_pb2.NodeStatistics(
            node_id="n7",
            num_windows=800,
            slowest_ratio=0.9,
            expected_ratio=0.1,
            work_ratio=1.12,
            last_ratio=0.8,
            is_slow=True,
            service_s=500_000.0,
        )
    )
    found: dict[str, Any] = as_json(message)
    return found


def test_weeks_are_shown_and_can_be_read_by_everybody(tmp_path: Path) -> None:
    with browser() as chromium, controller(tmp_path / "state") as running:
        with Client(running.grpc, state_dir=running.state_dir) as client:
            job_id = client.submit(SPEC, wait_for_nodes=True).job_id
        visit = Visit(chromium, f"http://{running.http}", viewport={"width": 360, "height": 800})
        visit.open(f"/jobs/{job_id}")
        visit.shows("No trend yet: 0 hours with steps")
        answer = json.dumps(weeks(job_id))
        visit.page.route(
            "**/trends", lambda route: route.fulfill(body=answer, content_type="application/json")
        )
        visit.open(f"/jobs/{job_id}")
        visit.shows("MFU changes by -9.1% a week")
        visit.shows("a step every 60 steps")
        visit.page.get_by_role("img", name="Tokens per second by the hour").wait_for()
        row = visit.page.get_by_role("row", name="n7 slow")
        assert "90 % (expected 10 %)" in row.inner_text()
        width = visit.page.evaluate("document.documentElement.scrollWidth")
        assert width <= 360
        visit.is_fit_for_all()
        # Axe is from a file; all else is from the controller.
        assert visit.foreign == []
