"""A person submits a job in the page, watches it survive a fault, and steers the fleet."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.controller.access.certificates import tokens_file
from tests.controller.processes import UP, Controller, controller
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.throttled import throttled
from tests.web import pipelines
from tests.web.browser import HURRIED, Answers, Visit
from tests.web.glow import WATCH, glowing

pytestmark = pytest.mark.usefixtures("closed_pages")

# Hangs are shown here and not acted upon, so that they last until they were seen.
SPEC = """\
name: seen
steps: 100000
model: {layers: 1, hidden: 32, heads: 2, seq_len: 32}
parallel: {dp: 2, micro_batch: 2}
data: {global_batch: 4, max_bytes: 65536}
resources: {workers_per_node: 1, device: cpu, standby: 1, black_box_records: 16384}
recovery: {heartbeat_period_s: 0.5, preflight: false}
detectors: {hang: log}
checkpoint: {storage_interval_steps: 20}
eval: {interval_steps: 50}
"""
SHORT_SPEC = """\
name: short
steps: 20
model: {layers: 1, hidden: 32, heads: 2, seq_len: 32}
parallel: {dp: 1, micro_batch: 2}
data: {global_batch: 4, max_bytes: 65536}
resources: {workers_per_node: 1, device: cpu}
recovery: {preflight: false}
"""
SUMMED = ("step_s", "bubble_s")
PAGES = (
    "/jobs",
    "/jobs/JOB",
    "/jobs/JOB/ranks",
    "/jobs/JOB/heat-map",
    "/jobs/JOB/timeline",
    "/nodes",
    "/nodes/node-0",
    "/incidents",
    "/incidents/JOB.i1",
    "/submit",
)


@pytest.fixture(scope="module")
def running(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    folder = tmp_path_factory.mktemp("page")
    options = ("--nodes", "2", "--standby", "1", "--workers-per-node", "1")
    with controller(folder / "state", *options, program=UP) as found:
        Cluster(found.state_dir, lambda: found.grpc).wait_nodes(3)
        yield found


@pytest.fixture(scope="module")
def job_id(chromium: Any, running: Controller) -> str:
    """Of a job that was submitted in the page and trains."""
    visit = Visit(chromium, base_of(running))
    visit.open("/submit")
    spec = visit.page.get_by_label("Job spec")
    spec.fill("name: seen\nsteps: -1")
    visit.shows("is -1; allowed: a whole number, 1 or more")
    visit.page.get_by_role("list", name="Lines with problems").get_by_text("line 2").click()
    assert visit.page.evaluate("String(getSelection())") == "steps: -1"
    spec.fill(SPEC)
    visit.shows("The spec is right.")
    visit.page.get_by_role("region", name="Memory of one rank").get_by_text("KiB").first.wait_for()
    visit.page.get_by_label("Projected on").select_option("h100")
    visit.shows("A step on h100")
    visit.shows("sent by the busiest rank")
    visit.page.get_by_role("button", name="Submit").click()
    visit.page.wait_for_url(re.compile("/jobs/seen-"))
    visit.shows("RUNNING")
    # The refused spec is an answer that the browser tells of.
    assert visit.foreign == []
    return str(visit.page.url.rpartition("/")[2])


def test_a_job_trains_before_ones_eyes(chromium: Any, running: Controller, job_id: str) -> None:
    visit = Visit(chromium, base_of(running))
    visit.open(f"/jobs/{job_id}")
    visit.page.locator("figure.chart canvas").nth(4).wait_for()
    assert visit.page.locator("figure.chart canvas").count() == 5
    first = step_of(visit)
    wait_for(lambda: step_of(visit) > first, "the step to rise without a reload")
    # It has done compute and communication of its own, and committed a checkpoint.
    parts = re.compile("^Parts of a step over steps; now: forward [0-9].*dp communication [0-9]")
    visit.page.get_by_role("img", name=parts).wait_for()
    for name in ("HFU", "Perplexity", "Epochs"):
        tile = visit.page.locator(".tile").filter(has=visit.page.get_by_text(name, exact=True))
        tile.get_by_text(re.compile("[0-9]")).first.wait_for()
    newest = visit.page.get_by_role("row").filter(has_text="newest")
    newest.get_by_text(re.compile("[0-9] [KM]iB")).wait_for()
    visit.page.get_by_role("button", name="Show the logs").click()
    visit.shows("training from the beginning")
    visit.page.get_by_role("combobox", name="Attempt").select_option("all")
    visit.page.get_by_label("Search whole logs").fill("from the begin+ing")
    visit.page.keyboard.press("Enter")
    line = re.compile(r"^\d{4}-\d\d-\d\d .*\[attempt 1 \S+ rank \d+\] ")
    # Of both ranks, which may come one after the other.
    visit.page.get_by_text(line).first.wait_for()
    visit.is_fit_for_all()
    visit.page.get_by_label("Search whole logs").fill("(")
    visit.page.keyboard.press("Enter")
    visit.page.get_by_role("alert").filter(has_text="unclosed group").wait_for()


def test_a_page_finds_its_controller_again(chromium: Any, running: Controller, job_id: str) -> None:
    visit = Visit(chromium, base_of(running))
    visit.open(f"/jobs/{job_id}")
    http, _ = running.http, step_of(visit)
    running.kill()
    visit.shows("connection lost, trying again")
    running.arguments = (*running.arguments, "--http", http)
    running.start()
    visit.page.get_by_text("connection lost").wait_for(state="detached")
    before = step_of(visit)
    wait_for(lambda: step_of(visit) > before, "the step to rise again")
    assert visit.foreign == []


def test_a_killed_rank_is_an_incident_that_closes(
    chromium: Any, running: Controller, job_id: str
) -> None:
    visit = Visit(chromium, base_of(running))
    visit.open(f"/jobs/{job_id}")
    cluster_of(running).kill_rank(job_id, cluster_of(running).job(job_id).attempt, 1)
    row = visit.page.get_by_role("row").filter(has_text="worker killed")
    row.get_by_text("CLOSED").wait_for()
    # Not the first one, where a busy machine has made steps slower before.
    incident_id = row.get_by_role("link").inner_text()
    # The same on the axis of time, with the keys alone, and on the curves.
    strip = visit.page.get_by_role("group", name="Attempts, incidents and checkpoints over time")
    strip.get_by_role("button", name="Attempt 2,").wait_for()
    strip.get_by_role("button").first.focus()
    visit.page.keyboard.press("Home")
    visit.page.locator("p.chosen", has_text="Attempt 1,").get_by_text("then SUSPENDING").wait_for()
    chosen = visit.page.locator("p.chosen")

    def pressed_to_the_incident() -> bool:
        # Checkpoints may be committed meanwhile, and stand before it.
        visit.page.keyboard.press("ArrowRight")
        return "worker killed" in chosen.inner_text()

    wait_for(pressed_to_the_incident, "the keys to come to the incident")
    link = chosen.get_by_role("link")
    assert link.get_attribute("href") == f"/incidents/{incident_id}"
    visit.page.locator("summary", has_text="A a new attempt, F a fault").click()
    visit.page.locator(".marks").get_by_text("attempt 2 begins").wait_for()
    visit.page.locator(".marks").get_by_role("link", name=incident_id).wait_for()
    row.get_by_role("link").click()
    visit.shows("What happened")
    visit.shows("killed by SIGKILL")
    visit.shows("restart in place")
    visit.is_fit_for_all()


def test_the_rank_that_holds_up_the_others_is_named(
    chromium: Any, running: Controller, job_id: str
) -> None:
    visit = Visit(chromium, base_of(running))
    visit.page.add_init_script(WATCH)
    visit.open(f"/jobs/{job_id}/ranks")
    cluster = cluster_of(running)
    cluster.wait_state(job_id, "RUNNING")
    pid = cluster.presents(job_id, cluster.job(job_id).attempt)[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        visit.shows("Rank 1 on")
        visit.shows("is stopped")
        wait_for(lambda: len(glowing(visit)) == 1, "it alone to glow")
        canvas = visit.page.get_by_role("application")
        canvas.focus()
        canvas.press("ArrowRight")
        visit.shows("pp 0, dp 1, tp 0")
        visit.page.get_by_role("button", name="Stacks").click()
        visit.page.locator("pre.stacks", has_text="train_step").wait_for()
    finally:
        os.kill(pid, signal.SIGCONT)
    visit.page.locator(".banner.bad").wait_for(state="detached")
    visit.page.get_by_role("button", name="Profile for 5 s").click()
    with visit.page.expect_download() as saved:
        visit.page.get_by_role("button", name="Save for speedscope").click()
    assert saved.value.suggested_filename == f"{job_id}-rank-1.speedscope.json"
    document = json.loads(saved.value.path().read_text())
    assert any("MainThread" in thread["name"] for thread in document["profiles"])
    visit.page.get_by_role("button", name="Profile beside a peer").click()
    visit.page.get_by_role("columnheader", name="Rank 0", exact=True).wait_for()
    visit.shows("does the same in another replica")
    visit.is_fit_for_all()


def test_a_hang_is_an_incident_that_opens_and_is_resolved_before_ones_eyes(
    chromium: Any, tmp_path: Path
) -> None:
    """Here the hang is acted upon: the stopped rank's worker is replaced, and training goes on."""
    options = ("--local-nodes", "2", "--workers-per-node", "1")
    with controller(tmp_path / "state", *options) as found:
        cluster = cluster_of(found)
        cluster.wait_nodes(2)
        job_id = cluster.submit(name="stopped", steps=100_000)
        cluster.wait_step(job_id, 30)
        incidents = Visit(chromium, base_of(found))
        # It is over in seconds, and the page asks every two.
        incidents.page.add_init_script(HURRIED)
        incidents.open("/incidents")
        incidents.shows("No incidents")
        ranks = Visit(chromium, base_of(found))
        ranks.open(f"/jobs/{job_id}/ranks")
        os.kill(cluster.presents(job_id, cluster.job(job_id).attempt)[1].pid, signal.SIGSTOP)
        row = incidents.page.get_by_role("row").filter(has_text=f"{job_id}.i1")
        row.locator(".state", has_not_text="CLOSED").wait_for()
        ranks.shows("Last faults")
        ranks.page.get_by_role("button", name="rank 1").first.click()
        ranks.page.get_by_role("definition").filter(has_text=f"{job_id}.i1").wait_for()
        row.locator(".state", has_text="CLOSED").wait_for()
        row.get_by_role("link", name=f"{job_id}.i1").click()
        incidents.shows("rank 1 stopped by a signal")
        for visit in (incidents, ranks):
            visit.is_fit_for_all()


def test_a_slow_rank_is_seen_on_the_heat_map(
    chromium: Any, running: Controller, job_id: str
) -> None:
    """Rank 1 has its core for a quarter of the time."""
    cluster = cluster_of(running)
    cluster.wait_state(job_id, "RUNNING")
    pid = cluster.presents(job_id, cluster.job(job_id).attempt)[1].pid
    visit = Visit(chromium, base_of(running))
    answers = Answers()
    with throttled(pid, runs_s=0.01, stands_s=0.03):
        wait_for(lambda: slowdown(running, job_id) > 1.5, "rank 1 to work for longer than rank 0")
        # Of so fast a job the steps that one looks at are gone in seconds.
        visit.page.route("**/heat-map?*", answers.first)
        visit.open(f"/jobs/{job_id}/heat-map")
        slower = visit.page.get_by_role("region", name="Slower than their peers")
        slowest = slower.get_by_role("listitem").first
        slowest.get_by_role("button", name="rank 1").click()
        visit.shows("of the median of its peers")
        canvas = visit.page.get_by_role("application")
        canvas.press("Shift+ArrowUp")
        canvas.press("Enter")
        visit.shows("rank 0 on")
        visit.page.get_by_role("button", name="Next outlier").click()
        visit.shows(", an outlier.")
        assert visit.page.get_by_role("status").inner_text().startswith("rank 1 on")
        before = picture_of(canvas)
        visit.page.get_by_role("button", name="Zoom in").click()
        wait_for(lambda: picture_of(canvas) != before, "the map to be larger")
        before = picture_of(canvas)
        canvas.press("ArrowRight")
        canvas.press("ArrowLeft")
        canvas.press("ArrowLeft")
        wait_for(lambda: picture_of(canvas) != before, "the map to move")
        canvas.press("0")
        visit.page.get_by_label("Rows by").select_option("Position (dp, pp, tp)")
        visit.page.get_by_text("Loading…").wait_for(state="detached")
        visit.shows("Peers of a rank: all ranks of the job")
        visit.page.get_by_label("Shown").select_option("Waiting for others")
        slowest.get_by_role("button", name="rank 0").wait_for()
        visit.is_fit_for_all()
        visit.page.unroute("**/heat-map?*")
        first = step_chosen(slowest, visit)
        wait_for(lambda: step_chosen(slowest, visit) > first, "steps that ranks still remember")
        visit.page.get_by_role("link", name="The step over ranks").click()
        visit.shows("Where the step went")
        visit.shows("Others waited for it")
        canvas = visit.page.get_by_role("application")
        canvas.press("Enter")
        visit.shows("Rank 0")
    visit.is_fit_for_all()


def step_chosen(slowest: Any, visit: Visit) -> int:
    """The newest step that the map has, once it is chosen."""
    slowest.get_by_role("button", name="rank 0").click()
    link = visit.page.get_by_role("link", name="The step over ranks")
    return int(str(link.get_attribute("href")).rpartition("/")[2])


def picture_of(canvas: Any) -> str:
    return str(canvas.evaluate("canvas => canvas.toDataURL()"))


def test_a_bubble_is_seen_in_the_timeline_of_a_step(chromium: Any, tmp_path: Path) -> None:
    """Four stages with two micro-batches: each stands still for more than half of the time."""
    options = ("--local-nodes", "2", "--workers-per-node", "2")
    with controller(tmp_path / "state", *options) as found:
        cluster = cluster_of(found)
        cluster.wait_nodes(2)
        with cluster.client as client:
            job_id = client.submit(pipelines.SPEC).job_id
        cluster.wait_step(job_id, 10)
        url = f"{base_of(found)}/api/v1/jobs/{job_id}/timeline"
        with urllib.request.urlopen(url, timeout=30) as response:
            step = json.load(response)
        total = {name: sum(each[name] for each in step["tracks"]) for name in SUMMED}
        assert total["bubble_s"] > pipelines.BUBBLE / 2 * total["step_s"]
        # Each message was noted by both of its ends.
        messages = [
            bar for track in step["tracks"] for bar in track["bars"] if bar["name"] == "recv"
        ]
        assert len(messages) == 2 * (pipelines.STAGES - 1) * pipelines.MICRO_BATCHES
        assert all(bar["last"] == bar["peer"] for bar in messages)
        visit = Visit(chromium, base_of(found))
        visit.open(f"/jobs/{job_id}/timeline/{step['step']}")
        share = 100 * total["bubble_s"] / total["step_s"]
        visit.shows(f"bubble {share:.1f} %")
        canvas = visit.page.get_by_role("application")
        status = visit.page.get_by_role("main").get_by_role("status")
        for _ in range(pipelines.STAGES):
            canvas.press("Shift+ArrowDown")
        canvas.press("Enter")
        while "pp recv" not in status.inner_text():
            visit.page.get_by_role("button", name="Operation after").click()
        told = status.inner_text()
        assert f"From rank {pipelines.STAGES - 2}: waited" in told
        assert "another stage had its turn" in told
        visit.is_fit_for_all()


def slowdown(running: Controller, job_id: str) -> float:
    """The own work of rank 1 over that of rank 0, summed over the steps that the page shows."""
    url = f"{base_of(running)}/api/v1/jobs/{job_id}/heat-map?measure=work&steps=400"
    with urllib.request.urlopen(url, timeout=30) as response:
        rows = {row["first"]: row["seconds"] for row in json.load(response)["rows"]}
    first, second = (sum(filter(None, rows.get(rank, []))) for rank in (0, 1))
    return second / first if first else 0.0


def test_two_jobs_are_compared_by_every_curve(
    chromium: Any, running: Controller, job_id: str
) -> None:
    cluster = cluster_of(running)
    with cluster.client as client:
        other = client.submit(yaml.safe_load(SHORT_SPEC)).job_id
    cluster.wait_state(other, "SUCCEEDED")
    visit = Visit(chromium, base_of(running))
    visit.open(f"/jobs/{job_id}")
    visit.page.get_by_label("Compare with").select_option(other)
    shown = [
        visit.page.get_by_role("img", name=re.compile(f"^{title} over steps; now: .*{other} [0-9]"))
        for title in ("Loss", "Gradient norm", "Tokens per second", "Step time")
    ]
    shown.append(visit.page.get_by_role("img", name=re.compile(f"compute {other} [0-9]")))
    for chart in shown:
        chart.wait_for()
    visit.is_fit_for_all()


def test_a_node_is_cordoned(chromium: Any, running: Controller) -> None:
    visit = Visit(chromium, base_of(running))
    visit.open("/nodes")
    row = row_of(visit, "node-2")
    row.get_by_role("button", name="Cordon").click()
    row.get_by_text("cordoned").wait_for()
    row.get_by_role("button", name="Uncordon").click()
    row.get_by_text("cordoned").wait_for(state="detached")
    visit.is_fit_for_all()


def test_a_spare_is_checked_and_its_page_remembers(
    chromium: Any, running: Controller, job_id: str
) -> None:
    visit = Visit(chromium, base_of(running))
    visit.page.on("dialog", lambda dialog: dialog.accept())
    visit.open("/nodes")
    pool = visit.page.get_by_role("region", name="Spare pool").last
    pool.get_by_text("STANDBY").wait_for()
    spare = str(pool.get_by_role("link").first.inner_text())
    row_of(visit, spare).get_by_role("button", name="Diagnose").click()
    visit.shows(f"Checks of {spare}")
    visit.shows("Checked: done")
    verdicts = visit.page.get_by_role("region", name="Verdicts")
    verdict = str(verdicts.locator(".state").inner_text()).split()[-1]
    verdicts.get_by_role("link", name=spare).click()
    visit.page.get_by_role("heading", name=spare).wait_for()
    runs = visit.page.get_by_role("region", name="Runs of diagnostics")
    runs.get_by_role("row").nth(1).get_by_text(verdict).wait_for()
    runs.get_by_role("button", name="Show").first.click()
    visit.page.get_by_role("region", name="Findings of run").wait_for()
    visit.shows("Changes of its state")
    visit.is_fit_for_all()


def test_a_node_has_the_faults_that_name_it(
    chromium: Any, running: Controller, job_id: str
) -> None:
    """The rank that was killed was on one of the job's nodes."""
    visit = Visit(chromium, base_of(running))
    node = cluster_of(running).job(job_id).nodes[1]
    visit.open(f"/nodes/{node}")
    visit.shows("have not been compared with those of other nodes")
    faults = visit.page.get_by_role("region", name="Incidents of this node")
    faults.get_by_text("worker killed").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["wide", "phone"])
def test_every_page_is_fit_for_all(
    chromium: Any, running: Controller, job_id: str, scheme: str, size: tuple[int, int]
) -> None:
    viewport = {"width": size[0], "height": size[1]}
    visit = Visit(chromium, base_of(running), viewport=viewport, color_scheme=scheme)
    for page in PAGES:
        visit.open(page.replace("JOB", job_id))
        visit.page.get_by_text("Loading…").wait_for(state="detached")
        width = visit.page.evaluate("document.documentElement.scrollWidth")
        assert width <= size[0], f"{page} is {width} pixels wide"
        visit.is_fit_for_all()


def test_what_is_not_there_is_said(chromium: Any, running: Controller) -> None:
    visit = Visit(chromium, base_of(running))
    visit.open("/jobs/nobody")
    visit.shows("there is no job 'nobody'")
    visit.open("/elsewhere")
    visit.shows("There is no page /elsewhere")


def row_of(visit: Visit, node: str) -> Any:
    """A node's row in the list of all."""
    listed = visit.page.get_by_role("region", name="Nodes", exact=True)
    return listed.get_by_role("row").filter(has_text=node)


def base_of(running: Controller) -> str:
    return f"http://{running.http}"


def cluster_of(running: Controller) -> Cluster:
    return Cluster(running.state_dir, lambda: running.grpc)


def step_of(visit: Visit) -> int:
    text = visit.page.locator(".tile dd").first.inner_text()
    return int(text.partition("/")[0].replace(",", ""))


def test_a_person_logs_in_and_out_with_a_token(chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    given = tokens_file(path)
    with controller(tmp_path / "state", "--tokens-file", str(path)) as found:
        visit = Visit(chromium, base_of(found))
        visit.open("/nodes")
        visit.shows("This controller asks for a token.")
        # The browser tells of what was refused, too.
        visit.complaints.clear()
        visit.is_fit_for_all()
        token = visit.page.get_by_label("Token")
        token.fill("outlast_wrong")
        visit.page.get_by_role("button", name="Log in").click()
        visit.shows("the token is not known, or has expired")
        token.fill(given["vera"])
        visit.page.get_by_role("button", name="Log in").click()
        # The page that was asked for, to who has logged in; also after it is opened anew.
        visit.page.get_by_role("heading", name="Nodes", exact=True).wait_for()
        visit.shows("vera (viewer)")
        visit.shows("to cordon, drain or check nodes takes an operator")
        visit.complaints.clear()
        visit.open("/jobs")
        visit.shows("vera (viewer)")
        visit.is_fit_for_all()
        # A script of the page cannot read it.
        assert visit.page.evaluate("document.cookie") == ""
        visit.page.get_by_role("button", name="Log out").click()
        visit.shows("This controller asks for a token.")
        assert visit.foreign == []
