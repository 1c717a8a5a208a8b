"""The heat map of a large job: a part of its ranks first, then all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.controller.processes import controller
from tests.web.browser import Visit, browser

NUM_RANKS, STRIDE, STEPS = 10_240, 20, 50


def answer(ranks: range, stride: int) -> dict[str, Any]:
    """As the API answers; rank 40 is slow."""
    return {
        **dict.fromkeys(("attempt", "newest_attempt"), 1),
        "measure": "work",
        "order": "rank",
        "num_ranks": NUM_RANKS,
        "node_stride": stride,
        "layout": {"tp": 1, "pp": 1, "dp": NUM_RANKS, "ep": 1, "cp": 1},
        "alike": [],
        "steps": list(range(1, STEPS + 1)),
        "missing": [],
        "rows": [
            {
                **dict.fromkeys(("first", "last", "slowest"), rank),
                "ranks": [rank],
                "node": f"node-{rank}",
                "pp": 0,
                "mean_ratio": 1.4 if rank == 40 else 1.0,
                "outliers": [[0, STEPS]] if rank == 40 else [],
                "seconds": [1.0] * STEPS,
                "percents": [140 if rank == 40 else 100] * STEPS,
            }
            for rank in ranks
        ],
    }


class Held:
    """Answers the part at once, and the whole when it is let go."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.waiting: list[Any] = []

    def __call__(self, route: Any) -> None:
        self.asked.append(route.request.url)
        if "ranks=" not in route.request.url:
            self.waiting.append(route)
            return
        part = answer(range(0, NUM_RANKS, STRIDE * 8), STRIDE)
        route.fulfill(body=json.dumps(part), content_type="application/json")

    def let_go(self) -> None:
        whole = json.dumps(answer(range(0, NUM_RANKS, 10), 1))
        for route in self.waiting:
            route.fulfill(body=whole, content_type="application/json")


def test_a_part_of_the_ranks_is_shown_until_all_are_there(tmp_path: Path) -> None:
    held = Held()
    with browser() as chromium, controller(tmp_path / "state") as found:
        visit = Visit(chromium, f"http://{found.http}")
        visit.page.route("**/heat-map?*", held)
        visit.open("/jobs/large/heat-map")
        visit.shows("One node in 20 is shown, the others are being read")
        visit.page.get_by_role("application").wait_for()
        visit.shows("which have equal work, as far as they are shown")
        # Of a part nobody is to conclude that no other rank is slow.
        slowest = visit.page.get_by_role("region", name="Slower than their peers")
        assert slowest.count() == 0
        visit.is_fit_for_all()
        picture = visit.page.get_by_role("application")
        zoom_in = visit.page.get_by_role("button", name="Zoom in")
        for _ in range(3):
            zoom_in.click()
        assert "rows 16 to 49" in picture.get_attribute("aria-label")
        held.let_go()
        slowest.get_by_role("button", name="rank 40").wait_for()
        assert visit.page.get_by_text("are being read").count() == 0
        # Those rows are of other ranks now.
        assert "rows 1 to 1024" in picture.get_attribute("aria-label")
        zoom_in.click()
        assert "rows 103 to 922" in picture.get_attribute("aria-label")
        assert ["ranks=512" in url for url in held.asked] == [True, False]
        # Of another choice likewise.
        with visit.page.expect_request(lambda asked: "order=node" in asked.url) as asked:
            visit.page.get_by_label("Rows by").select_option("Node")
        assert "ranks=512" in asked.value.url
