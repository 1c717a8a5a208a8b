"""Held-out sets on a job's page: a curve for each, beside their mean."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from outlast.client import Client
from tests.controller.processes import UP, controller
from tests.e2e.cluster import Cluster
from tests.web.browser import Visit, browser

SETS = {"books": "books.npy", "web": "web.npy"}


def test_each_held_out_set_has_its_curve(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name in ("train.npy", *SETS.values()):
        np.save(tmp_path / name, generator.integers(0, 64, 4096, dtype=np.uint16))
    spec = {
        "name": "sets",
        "steps": 20,
        "model": {"layers": 1, "hidden": 32, "heads": 2, "seq_len": 32, "vocab_size": 64},
        "parallel": {"dp": 1, "micro_batch": 2},
        "data": {
            "global_batch": 4,
            "tokens": str(tmp_path / "train.npy"),
            "validation_tokens": {name: str(tmp_path / file) for name, file in SETS.items()},
        },
        "eval": {"interval_steps": 5},
        "resources": {"workers_per_node": 1, "device": "cpu"},
        "recovery": {"preflight": False},
    }
    options = ("--nodes", "1", "--standby", "0", "--workers-per-node", "1")
    with browser() as chromium, controller(tmp_path / "state", *options, program=UP) as running:
        cluster = Cluster(running.state_dir, lambda: running.grpc)
        cluster.wait_nodes(1)
        with Client(running.grpc, state_dir=running.state_dir) as client:
            job_id = client.submit(spec).job_id
        visit = Visit(chromium, f"http://{running.http}")
        # As it comes, and as the page finds it when it is opened later.
        for _ in range(2):
            visit.open(f"/jobs/{job_id}")
            for name in SETS:
                visit.shows(f"held out: {name}")
            visit.shows("all 20 steps are done")
        # A part of the curves, with the keys alone.
        visit.page.get_by_label("From step").fill("5")
        visit.page.keyboard.press("Enter")
        zoomed = visit.page.get_by_role("img", name=re.compile("^Loss over steps 5 to 20; now: "))
        zoomed.wait_for()
        visit.is_fit_for_all()
        visit.page.get_by_role("button", name="See all").click()
        zoomed.wait_for(state="detached")
