"""Marks on a job's curves where training was changed: S for batches left out, R for going back."""

from __future__ import annotations

from pathlib import Path

from outlast.v1 import jobs_pb2
from tests.chaos.orders import Desk, Order
from tests.controller.processes import controller
from tests.e2e.by_hand import QUICKLY_CHECKED
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.held import obeyed
from tests.web.browser import Visit, browser

BAD_STEP, KEPT_STEP = 30, 18
# Steps that are slow enough for a job to be paused before its end.
STEPS, STEP_S = 90, 0.1
# Letters are drawn on a canvas: each as it was drawn last on the first chart, with its place.
WATCH = """window.drawn = new Map();
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  fillText.call(this, text, x, y);
  const isFirst = this.canvas === document.querySelector("figure.chart canvas");
  if (isFirst && /^[A-Z]$/.test(text)) window.drawn.set(`${text} ${Math.round(x)}`, [text, x]);
};"""


def trained(cluster: Cluster, desk: Desk) -> jobs_pb2.Job:
    """A job whose loss is NaN twice at a step, so that it goes back to the weights of a step before
    and leaves out what lies between; then a person lets it go on from a chosen checkpoint."""
    desk.give((Order(name="bad", at="step", act="nan", rank=1, attempt=0, step=BAD_STEP),))
    desk.slow_down("steps", step_s=STEP_S)
    job_id = cluster.submit(
        steps=STEPS,
        checkpoint={"storage_interval_steps": 10, "keep": 20},
        detectors={"non_finite_again": "rollback", "rollback_steps": BAD_STEP - KEPT_STEP},
    )
    wait_for(lambda: cluster.job(job_id).skipped, "batches to be left out")
    wait_for(lambda: cluster.job(job_id).committed_step > BAD_STEP, "a checkpoint behind them")
    with cluster.client as client:
        client.pause(job_id)
        chosen = cluster.wait_state(job_id, "PAUSED").committed_step
        client.resume(job_id, checkpoint_step=chosen)
    desk.speed_up()
    return cluster.wait_state(job_id, "SUCCEEDED")


def lettered(visit: Visit) -> dict[str, list[float]]:
    """Where the first chart has each letter, from left to right."""
    found: dict[str, list[float]] = {}
    for letter, x in visit.page.evaluate("[...window.drawn.values()]"):
        found.setdefault(letter, []).append(x)
    return {letter: sorted(places) for letter, places in found.items()}


def test_batches_left_out_and_steps_gone_back_to_are_marked_on_the_curves(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "orders")
    nodes = ("--local-nodes", "3", "--workers-per-node", "1", *QUICKLY_CHECKED)
    state = tmp_path / "state"
    with browser() as chromium, obeyed(desk), controller(state, *nodes) as running:
        cluster = Cluster(state, lambda: running.grpc)
        cluster.wait_nodes(3)
        job = trained(cluster, desk)
        assert [(each.first, each.last) for each in job.skipped] == [(KEPT_STEP + 1, BAD_STEP)]
        (chosen,) = job.chosen_starts
        (back,) = [e for e in cluster.incidents(job.job_id) if e.action == "roll_back"]
        assert back.resumed_step <= KEPT_STEP
        visit = Visit(chromium, f"http://{running.http}")
        visit.page.add_init_script(WATCH)
        visit.open(f"/jobs/{job.job_id}")
        visit.page.locator("summary", has_text="S batches left out, R gone back").click()
        listed = visit.page.locator(".marks")
        listed.get_by_text(
            f"Step {KEPT_STEP + 1}: the batches of steps {KEPT_STEP + 1} to {BAD_STEP} are left out"
        ).wait_for()
        went = listed.get_by_role("listitem").filter(has_text="rolled back")
        assert f"Step {back.resumed_step}: rolled back from step {back.fault_step}" in (
            went.inner_text()
        )
        went.get_by_role("link", name=back.incident_id).wait_for()
        listed.get_by_text(
            f"Step {chosen.step}: a person let it go on after step {chosen.step}"
        ).wait_for()
        drawn_at_their_steps(visit, back.resumed_step, chosen.step)
        visit.is_fit_for_all()


def drawn_at_their_steps(visit: Visit, rolled_back_step: int, chosen_step: int) -> None:
    visit.page.locator("figure.chart canvas").first.wait_for()
    found = lettered(visit)
    (left_out,), (rolled_back, chosen) = found["S"], found["R"]
    assert rolled_back < left_out < chosen
    px_per_step = (chosen - rolled_back) / (chosen_step - rolled_back_step)
    steps = KEPT_STEP + 1 - rolled_back_step
    assert abs(left_out - rolled_back - px_per_step * steps) < 1
