"""Pictures of the page: of a job that has survived a fault and of one that hangs, of a pipeline
with a bubble and of one with a slow link.

    python -m tests.web.screenshots [FOLDER]

Every page in two sizes and both themes, into the folder. Without one they are in `build/pictures`,
and those that the documentation shows are copied to `docs/pictures`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.controller.access.certificates import tokens_file
from tests.controller.processes import ROOT, UP, Controller, controller
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.throttled import throttled
from tests.netns.fleet import HTTP, why_not
from tests.netns.slow_link import slow_link
from tests.web import pipelines
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
BUILT, DOCS = ROOT / "build" / "pictures", ROOT / "docs" / "pictures"
# Of the documentation.
SHOWN = (
    "page-jobs-wide-light.png",
    "page-job-wide-light.png",
    "page-ranks-wide-dark.png",
    "page-ranks-phone-dark.png",
    "page-nodes-wide-light.png",
    "page-node-wide-light.png",
    "page-incident-wide-light.png",
    "page-submit-wide-light.png",
    "page-heat-map-wide-light.png",
    "page-timeline-wide-light.png",
    "page-bubble-wide-light.png",
    "page-slow-link-wide-light.png",
    "page-login-wide-light.png",
)
# As many as any of these jobs has.
NUM_RANKS = 8
FAULT_STEP, LAST_STEP = 60, 120
STARVED_STEPS = 20


@dataclass(frozen=True, slots=True)
class Camera:
    """Takes pictures with a browser, of the pages at an address."""

    chromium: Any
    base: str
    folder: Path

    def take(self, name: str, path: str, prepare: Callable[[Visit], None] | None = None) -> None:
        """One page in every size and theme."""
        for size, (width, height) in SIZES.items():
            for theme in THEMES:
                viewport = {"width": width, "height": height}
                visit = Visit(self.chromium, self.base, viewport=viewport, color_scheme=theme)
                visit.open(path)
                if prepare is not None:
                    prepare(visit)
                # What is drawn comes after what is read.
                visit.page.get_by_text("Loading…").wait_for(state="detached")
                visit.page.wait_for_timeout(500)
                into = self.folder / f"page-{name}-{size}-{theme}.png"
                visit.page.screenshot(path=into, full_page=name != "ranks")
                print(into)
                visit.page.close()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else BUILT
    folder.mkdir(parents=True, exist_ok=True)
    # One that cannot be taken here stays as it is in the docs, whenever it was taken before.
    for name in SHOWN:
        (folder / name).unlink(missing_ok=True)
    _take_all(folder)
    if folder != BUILT:
        return
    for name in SHOWN:
        if (folder / name).exists():
            shutil.copyfile(folder / name, DOCS / name)


def _take_all(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="outlast-page-") as name:
        state = Path(name)
        options = ("--nodes", "4", "--standby", "1", "--workers-per-node", "2")
        with browser() as chromium:
            with controller(state / "state", *options, program=UP) as running:
                camera = Camera(chromium, f"http://{running.http}", folder)
                _take_job(camera, running)
                _take_bubble(camera, running)
            tokens = state / "tokens.yaml"
            tokens_file(tokens)
            with controller(state / "asks", "--tokens-file", str(tokens)) as running:
                Camera(chromium, f"http://{running.http}", folder).take("login", "/jobs")
        if reason := why_not():
            print(f"no picture of a slow link: {reason}")
            return
        place = state / "fleet"
        place.mkdir()
        with slow_link(place) as (fleet, job_id), browser(fleet.in_hub) as chromium:
            camera = Camera(chromium, f"http://{HTTP}", folder)
            camera.take(
                "slow-link", f"/jobs/{job_id}/timeline", lambda visit: _choose(visit, "recv")
            )


def _take_job(camera: Camera, running: Controller) -> None:
    """A job that has survived the loss of a rank, and its heat map and ranks while one is slow or
    stands still."""
    cluster = Cluster(running.state_dir, lambda: running.grpc)
    cluster.wait_nodes(5)
    with cluster.client as client:
        job_id = client.submit(SPEC).job_id
    cluster.wait_step(job_id, FAULT_STEP)
    attempt = cluster.job(job_id).attempt
    cluster.kill_rank(job_id, attempt, 3)
    wait_for(lambda: cluster.job(job_id).attempt > attempt, "the next attempt")
    cluster.wait_step(job_id, LAST_STEP)
    camera.take("jobs", "/jobs")
    camera.take("job", f"/jobs/{job_id}")
    camera.take("nodes", "/nodes")
    camera.take("node", f"/nodes/{cluster.job(job_id).nodes[1]}")
    camera.take("incidents", "/incidents")
    camera.take("incident", f"/incidents/{cluster.incidents(job_id)[-1].incident_id}")
    camera.take("submit", "/submit", _write_spec)
    camera.take("timeline", f"/jobs/{job_id}/timeline", lambda visit: _choose(visit, "dp"))
    slow = cluster.presents(job_id, cluster.job(job_id).attempt)[5].pid
    with throttled(slow, runs_s=0.01, stands_s=0.03):
        cluster.wait_step(job_id, cluster.job(job_id).step + STARVED_STEPS)
    camera.take("heat-map", f"/jobs/{job_id}/heat-map")
    os.kill(slow, signal.SIGSTOP)
    try:
        camera.take("ranks", f"/jobs/{job_id}/ranks", _choose_stopped)
    finally:
        os.kill(slow, signal.SIGCONT)
    with cluster.client as client:
        client.cancel(job_id)
    cluster.wait_state(job_id, "CANCELLED")


def _take_bubble(camera: Camera, running: Controller) -> None:
    """A step of a pipeline that has fewer micro-batches than stages."""
    cluster = Cluster(running.state_dir, lambda: running.grpc)
    with cluster.client as client:
        job_id = client.submit(pipelines.SPEC).job_id
    cluster.wait_step(job_id, STARVED_STEPS)
    camera.take("bubble", f"/jobs/{job_id}/timeline", lambda visit: _choose(visit, "recv"))


def _write_spec(visit: Visit) -> None:
    """With the plan of the job that it would be."""
    visit.page.get_by_label("Job spec").fill(yaml.safe_dump(SPEC, sort_keys=False))
    visit.shows("The spec is right.")
    visit.page.get_by_label("Projected on").select_option("h100")
    visit.shows("A step on h100")


def _choose_stopped(visit: Visit) -> None:
    visit.shows("is stopped")
    visit.shows("Who waits for whom")
    visit.page.get_by_role("application").press("ArrowRight")


def _choose(visit: Visit, word: str) -> None:
    """Go through the last rank's operations to the first whose words have this one."""
    canvas = visit.page.get_by_role("application")
    for _ in range(NUM_RANKS):
        canvas.press("Shift+ArrowDown")
    canvas.press("Enter")
    status = visit.page.get_by_role("main").get_by_role("status")
    while word not in status.inner_text().split():
        visit.page.get_by_role("button", name="Operation after").click()


if __name__ == "__main__":
    main()
