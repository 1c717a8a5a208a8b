"""Checkpoints on a job's page, which come in pages."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from controller.state_dir import JOURNAL
from outlast.client import Client
from tests.controller.processes import controller
from tests.web.browser import Visit, browser
from tests.web.test_trends_page import SPEC

PAGE = 20


def test_older_checkpoints_are_behind_a_button(tmp_path: Path) -> None:
    with browser() as chromium, controller(tmp_path / "state") as running:
        with Client(running.grpc, state_dir=running.state_dir) as client:
            job_id = client.submit(SPEC, wait_for_nodes=True).job_id
        with closing(sqlite3.connect(running.state_dir / JOURNAL)) as database, database:
            database.executemany(
                "INSERT INTO commits VALUES (?, ?, 1, 1.7e9, 1024)",
                [(job_id, step) for step in range(2 * PAGE + 1)],
            )
        visit = Visit(chromium, f"http://{running.http}", viewport={"width": 1280, "height": 900})
        visit.open(f"/jobs/{job_id}")
        pages = visit.page.get_by_role("navigation", name="Pages of checkpoints")
        table = visit.page.locator("section[aria-labelledby=checkpoints] tbody")

        def shows(steps: range) -> None:
            """The last row is that of the lowest step."""
            table.get_by_role("cell", name=str(steps[-1]), exact=True).first.wait_for()
            rows = [row.split()[0] for row in table.locator("tr").all_inner_texts()]
            assert rows == [str(step) for step in steps]

        shows(range(40, 20, -1))
        pages.get_by_role("button", name="Next").click()
        shows(range(20, 0, -1))
        pages.get_by_role("button", name="Next").click()
        shows(range(0, -1, -1))
        assert pages.get_by_role("button", name="Next").is_disabled()
        visit.is_fit_for_all()
        pages.get_by_role("button", name="Previous").click()
        shows(range(20, 0, -1))
        assert visit.foreign == []
