"""Pictures of the page, of a job that has survived a fault and of one that hangs.

    python -m tests.web.screenshots [FOLDER]   every page in two sizes and both themes

Without a folder, those that the documentation shows, into `docs/pictures`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.controller.processes import ROOT, UP, Controller, controller
from tests.e2e.cluster import Cluster
from tests.e2e.throttled import throttled
from tests.web.browser import Visit, browser

SPEC: dict[str, Any] = {
    "name": "gpt",
    "steps": 4000,
    "model": {"layers": 4, "hidden": 64, "heads": 4, "seq_len": 64},
    "parallel": {"tp": 2, "pp": 2, "dp": 2, "micro_batch": 1},
    "data": {"global_batch": 8, "max_bytes": 262144},
    "resources": {"workers_per_node": 2, "device": "cpu"},
    "recovery": {"heartbeat_period_s": 0.5},
    # It lasts until its picture is taken.
    "detectors": {"hang": "log"},
    "eval": {"interval_steps": 40},
}
SIZES = {"wide": (1280, 860), "phone": (390, 844)}
THEMES = ("light", "dark")
SHOWN = {
    ("job", "wide", "light"),
    ("ranks", "wide", "dark"),
    ("incident", "wide", "light"),
    ("heat-map", "wide", "light"),
}
FAULT_STEP, LAST_STEP = 60, 120
STARVED_STEPS = 20


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"
    wanted = SHOWN if len(sys.argv) == 1 else None
    folder.mkdir(parents=True, exist_ok=True)
    options = ("--nodes", "4", "--standby", "1", "--workers-per-node", "2")
    with (
        tempfile.TemporaryDirectory(prefix="outlast-page-") as name,
        browser() as chromium,
        controller(Path(name) / "state", *options, program=UP) as running,
    ):
        _take_all(chromium, running, folder, wanted)


def _take_all(
    chromium: Any, running: Controller, folder: Path, wanted: set[tuple[str, str, str]] | None
) -> None:
    cluster = Cluster(running.state_dir, lambda: running.grpc)
    cluster.wait_nodes(5)
    with cluster.client as client:
        job_id = client.submit(SPEC).job_id
    cluster.wait_step(job_id, FAULT_STEP)
    cluster.kill_rank(job_id, 1, 3)
    cluster.wait_step(job_id, LAST_STEP)
    pages = {
        "jobs": "/jobs",
        "job": f"/jobs/{job_id}",
        "nodes": "/nodes",
        "node": "/nodes/node-0",
        "incidents": "/incidents",
        "incident": f"/incidents/{job_id}.i1",
        "submit": "/submit",
        # Last: they hold up ranks.
        "heat-map": f"/jobs/{job_id}/heat-map",
        "ranks": f"/jobs/{job_id}/ranks",
    }
    for name, path in pages.items():
        if name == "heat-map":
            with throttled(cluster.presents(job_id, 2)[5].pid, runs_s=0.01, stands_s=0.03):
                cluster.wait_step(job_id, cluster.job(job_id).step + STARVED_STEPS)
        if name == "ranks":
            os.kill(cluster.presents(job_id, 2)[5].pid, signal.SIGSTOP)
        for size, (width, height) in SIZES.items():
            for theme in THEMES:
                if wanted is None or (name, size, theme) in wanted:
                    viewport = {"width": width, "height": height}
                    visit = Visit(
                        chromium, f"http://{running.http}", viewport=viewport, color_scheme=theme
                    )
                    _take(visit, name, path, folder / f"page-{name}-{size}-{theme}.png")


def _take(visit: Visit, name: str, path: str, into: Path) -> None:
    visit.open(path)
    if name == "ranks":
        visit.shows("is stopped")
        visit.page.get_by_role("application").press("ArrowRight")
    # What is drawn comes after what is read.
    visit.page.get_by_text("Loading…").wait_for(state="detached")
    visit.page.wait_for_timeout(500)
    visit.page.screenshot(path=into, full_page=name != "ranks")
    print(into)
    visit.page.close()


if __name__ == "__main__":
    main()
