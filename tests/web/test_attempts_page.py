"""What ranks of an attempt that has failed did last, from the pages that tell of it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.controller.processes import controller
from tests.e2e.cluster import Cluster, wait_for
from tests.web.browser import Visit, browser


def test_a_failed_attempt_has_its_timeline_and_heat_map(tmp_path: Path) -> None:
    options = ("--local-nodes", "2", "--workers-per-node", "1")
    with browser() as chromium, controller(tmp_path / "state", *options) as running:
        cluster = Cluster(running.state_dir, lambda: running.grpc)
        cluster.wait_nodes(2)
        job_id = cluster.submit(steps=100_000, recovery={"preflight": False})
        cluster.wait_step(job_id, 200)
        cluster.kill_rank(job_id, 1, 1)
        wait_for(lambda: cluster.job(job_id).attempt == 2, "another attempt")
        visit = Visit(chromium, f"http://{running.http}")
        visit.open(f"/jobs/{job_id}")
        strip = visit.page.get_by_role("group", name="Attempts, incidents and checkpoints over")
        strip.get_by_role("button", name="Attempt 1,").focus()
        visit.page.get_by_role("link", name="What its ranks did last").click()
        visit.page.wait_for_url(re.compile("/attempts/1/timeline$"))
        visit.page.get_by_role("table").get_by_text("node-1").wait_for()
        visit.page.get_by_role("button", name="Step before").click()
        visit.page.wait_for_url(re.compile(r"/attempts/1/timeline/\d+$"))
        visit.is_fit_for_all()
        visit.page.get_by_label("Attempt").select_option("")
        visit.page.wait_for_url(re.compile(f"/jobs/{job_id}/timeline$"))

        with visit.page.expect_response(re.compile("heat-map.*attempt=1")) as answer:
            visit.open(f"/jobs/{job_id}/attempts/1/heat-map")
        found = answer.value.json()
        visit.page.get_by_role("application").wait_for()
        # Own work of each step that it did, whatever is left of the operations of all of them.
        assert (found["attempt"], found["newest_attempt"], len(found["rows"])) == (1, 2, 2)
        assert found["steps"] == [*range(1, found["steps"][-1] + 1)][-1000:]
        assert len(found["steps"]) >= 200
        assert None not in found["rows"][0]["seconds"]
        visit.open(f"/incidents/{job_id}.i1")
        visit.page.get_by_role("link", name="attempt 1").click()
        visit.page.wait_for_url(re.compile("/attempts/1/timeline$"))
        assert visit.foreign == []
