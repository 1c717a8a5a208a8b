"""Timeline and heat map are zoomed, panned and chosen from by fingers, and by keys alone."""

from __future__ import annotations

import copy
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.controller.processes import controller
from tests.e2e.cluster import Cluster, wait_for
from tests.web.browser import Visit

PHONE = {"viewport": {"width": 390, "height": 640}, "has_touch": True}
# As in timeline.js and heatmap.js: what of a picture is left of and below its whole.
LEFT_PX, MAP_LEFT_PX, BOTTOM_PX = 56, 60, 18
# Of a pixel in what is seen, and of the digits of the label that says what is seen.
EXACT = 0.02
NUM_ROWS = 32


@pytest.fixture(scope="module")
def site(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Where the page is, and the id of a job of two ranks that trains."""
    folder = tmp_path_factory.mktemp("gestures")
    options = ("--local-nodes", "2", "--workers-per-node", "1")
    with controller(folder / "state", *options) as found:
        cluster = Cluster(found.state_dir, lambda: found.grpc)
        cluster.wait_nodes(2)
        job_id = cluster.submit(steps=100_000)
        cluster.wait_step(job_id, 30)
        yield f"http://{found.http}", job_id


def answer(site: tuple[str, str], what: str) -> Any:
    url = f"{site[0]}/api/v1/jobs/{site[1]}/{what}"
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def opened(chromium: Any, site: tuple[str, str], what: str, found: Any, **options: Any) -> Visit:
    """The view of a job with this answer, which stays the same while the job goes on."""
    visit = Visit(chromium, site[0], **options)
    body = json.dumps(found)
    visit.page.route(
        f"**/{what}?*", lambda route: route.fulfill(body=body, content_type="application/json")
    )
    visit.open(f"/jobs/{site[1]}/{what}")
    visit.page.get_by_role("application").wait_for()
    return visit


@pytest.fixture(params=["phone", "wide"])
def timeline(
    request: pytest.FixtureRequest, chromium: Any, site: tuple[str, str]
) -> Iterator[tuple[Visit, Any]]:
    """A step over ranks, and what the controller has answered of it."""
    found = answer(site, "timeline")
    visit = opened(chromium, site, "timeline", found, **(PHONE if request.param == "phone" else {}))
    yield visit, found
    visit.page.close()


@pytest.fixture
def heat_map(chromium: Any, site: tuple[str, str]) -> Iterator[Visit]:
    """On a phone, of more rows than the job has: each of its own comes again and again."""
    found = answer(site, "heat-map?measure=work")
    rows = [copy.deepcopy(found["rows"][rank % 2]) for rank in range(NUM_ROWS)]
    for rank, row in enumerate(rows):
        row.update(first=rank, last=rank, ranks=[rank], slowest=rank)
    found.update(rows=rows, num_ranks=NUM_ROWS)
    visit = opened(chromium, site, "heat-map", found, **PHONE)
    yield visit
    visit.page.close()


class Fingers:
    """On the screen, as the browser hears of them."""

    def __init__(self, visit: Visit) -> None:
        self._session = visit.page.context.new_cdp_session(visit.page)

    def drag(self, *paths: tuple[tuple[float, float], tuple[float, float]]) -> None:
        """Put fingers down at the beginnings of paths, move all at once, and lift them."""
        for step in range(11):
            points = [
                {"x": x + (to_x - x) * step / 10, "y": y + (to_y - y) * step / 10, "id": finger}
                for finger, ((x, y), (to_x, to_y)) in enumerate(paths)
            ]
            self._send("touchMove" if step else "touchStart", points)
        self._send("touchEnd", [])

    def _send(self, kind: str, points: list[dict[str, float]]) -> None:
        self._session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})


def numbers(visit: Visit) -> list[float]:
    """The ends of what the picture shows, as its label says them."""
    label = visit.page.get_by_role("application").get_attribute("aria-label")
    return [float(each) for each in re.findall(r"[\d.]+(?:e[+-]\d+)?", label)]


def box_of(visit: Visit) -> dict[str, float]:
    """Of the picture, on the screen."""
    canvas = visit.page.get_by_role("application")
    canvas.scroll_into_view_if_needed()
    found: dict[str, float] = canvas.bounding_box()
    return found


def middle_of(visit: Visit, left_px: float) -> tuple[float, float]:
    box = box_of(visit)
    middle = box["x"] + left_px + (box["width"] - left_px) / 2
    return middle, box["y"] + (box["height"] - BOTTOM_PX) / 2


@pytest.mark.parametrize("timeline", ["phone"], indirect=True)
def test_two_fingers_zoom_the_timeline_and_one_pans_it(timeline: tuple[Visit, Any]) -> None:
    visit, _ = timeline
    fingers = Fingers(visit)
    first, last = numbers(visit)
    x, y = middle_of(visit, LEFT_PX)
    fingers.drag(((x - 20, y), (x - 60, y)), ((x + 20, y), (x + 60, y)))
    wait_for(lambda: numbers(visit) != [first, last], "the picture to be larger")
    zoomed = numbers(visit)
    third = (last - first) / 3
    # What was between the fingers is there still.
    assert zoomed == pytest.approx([first + third, last - third], abs=EXACT * (last - first))
    width = box_of(visit)["width"] - LEFT_PX
    fingers.drag(((x, y), (x - width / 4, y)))
    wait_for(lambda: numbers(visit) != zoomed, "the picture to move")
    moved = [each + third / 4 for each in zoomed]
    assert numbers(visit) == pytest.approx(moved, abs=EXACT * (last - first))
    # Both at once: pulled aside while they come together.
    fingers.drag(((x - 60, y), (x - 10, y)), ((x + 60, y), (x + 70, y)))
    wait_for(
        lambda: numbers(visit)[1] - numbers(visit)[0] > 1.3 * third, "the picture to be smaller"
    )
    visit.page.get_by_role("button", name="Show all").tap()
    assert numbers(visit) == [first, last]
    assert (visit.complaints, visit.foreign) == ([], [])


@pytest.mark.parametrize("timeline", ["phone"], indirect=True)
def test_a_finger_that_goes_up_scrolls_the_page(timeline: tuple[Visit, Any]) -> None:
    visit, _ = timeline
    before = numbers(visit)
    x, y = middle_of(visit, LEFT_PX)
    scrolled = visit.page.evaluate("scrollY")
    Fingers(visit).drag(((x, y), (x, y - 150)))
    wait_for(lambda: visit.page.evaluate("scrollY") > scrolled + 50, "the page to be scrolled")
    assert numbers(visit) == before
    assert visit.page.get_by_role("main").get_by_role("status").count() == 0


@pytest.mark.parametrize("timeline", ["phone"], indirect=True)
def test_a_tap_chooses_the_operation_that_is_there_or_beside(timeline: tuple[Visit, Any]) -> None:
    visit, step = timeline
    longest = max(step["tracks"][1]["bars"], key=lambda bar: bar["ended_s"] - bar["begun_s"])
    box = box_of(visit)
    px_per_s = (box["width"] - LEFT_PX) / step["length_s"]
    x = box["x"] + LEFT_PX + (longest["begun_s"] + longest["ended_s"]) / 2 * px_per_s
    visit.page.touchscreen.tap(x, box["y"] + (box["height"] - BOTTOM_PX) * 0.75)
    status = visit.page.get_by_role("main").get_by_role("status")
    status.get_by_text("Rank 1", exact=True).wait_for()
    visit.page.get_by_role("button", name="Operation before").tap()
    visit.page.get_by_role("button", name="Operation after").tap()
    status.get_by_text("Rank 1", exact=True).wait_for()
    visit.is_fit_for_all()


def test_the_timeline_is_used_by_keys_alone(timeline: tuple[Visit, Any]) -> None:
    visit, step = timeline
    keys, canvas = visit.page.keyboard, visit.page.get_by_role("application")
    assert (
        "Keys: arrows pan"
        in visit.page.locator(f"#{canvas.get_attribute('aria-describedby')}").inner_text()
    )
    for _ in range(40):
        keys.press("Tab")
        if canvas.evaluate("canvas => canvas === document.activeElement"):
            break
    ring = canvas.evaluate("canvas => getComputedStyle(canvas).outline")
    assert "solid 2px" in ring
    first, last = numbers(visit)
    for _ in range(5):
        keys.press("+")
    zoomed = numbers(visit)
    assert zoomed[1] - zoomed[0] == pytest.approx(0.8**5 * (last - first), rel=EXACT)
    assert sum(zoomed) == pytest.approx(first + last, rel=EXACT)
    keys.press("ArrowLeft")
    eighth = (zoomed[1] - zoomed[0]) / 8
    assert numbers(visit) == pytest.approx([each - eighth for each in zoomed], rel=EXACT)
    keys.press("ArrowRight")
    keys.press("-")
    assert numbers(visit)[1] - numbers(visit)[0] == pytest.approx(
        0.8**4 * (last - first), rel=EXACT
    )
    for back in ("Home", "0"):
        keys.press("+")
        keys.press(back)
        assert numbers(visit) == [first, last]
    walked(visit, step)
    visit.is_fit_for_all()


def walked(visit: Visit, step: Any) -> None:
    """Keys come to operations, of the first rank and of the next; Enter chooses one."""
    keys = visit.page.keyboard
    reached = next(at for at, bar in enumerate(step["tracks"][0]["bars"]) if bar["group"] == "dp")
    for _ in range(reached + 1):
        keys.press("Shift+ArrowRight")
    cursor = visit.page.get_by_text(re.compile(r"^At rank 0: dp "))
    told = cursor.inner_text().removeprefix("At rank 0: ")
    status = visit.page.get_by_role("main").get_by_role("status")
    assert status.count() == 0, "it is not chosen yet"
    keys.press("Enter")
    status.get_by_text("Rank 0", exact=True).wait_for()
    assert told in status.inner_text()
    cursor.wait_for(state="detached")
    # Where it is out of sight, the picture follows.
    for _ in range(20):
        keys.press("+")
    before = numbers(visit)
    # The next ones may be in sight; the last one is at the end of the step.
    for _ in step["tracks"][0]["bars"]:
        keys.press("Shift+ArrowRight")
    wait_for(lambda: numbers(visit) != before, "the picture to follow")
    keys.press("Shift+ArrowDown")
    keys.press("Enter")
    status.get_by_text("Rank 1", exact=True).wait_for()


def test_the_heat_map_has_the_same_gestures(heat_map: Visit) -> None:
    canvas, fingers = heat_map.page.get_by_role("application"), Fingers(heat_map)
    before = numbers(heat_map)
    assert before[2:] == [1, NUM_ROWS]
    x, y = middle_of(heat_map, MAP_LEFT_PX)
    fingers.drag(((x - 20, y - 20), (x - 80, y - 80)), ((x + 20, y + 20), (x + 80, y + 80)))
    wait_for(lambda: numbers(heat_map) != before, "the map to be larger")
    first, last = numbers(heat_map)[2:]
    assert (first, last) == (pytest.approx(13, abs=1), pytest.approx(20, abs=1))
    # There is more above now, to which a finger moves and which the page leaves to it.
    scrolled = heat_map.page.evaluate("scrollY")
    fingers.drag(((x, y), (x, y + 100)))
    wait_for(lambda: numbers(heat_map)[2] < first, "the map to move")
    assert heat_map.page.evaluate("scrollY") == scrolled
    heat_map.page.touchscreen.tap(x, y)
    heat_map.shows("of the median of its peers")
    canvas.press("0")
    assert numbers(heat_map) == before
    canvas.press("Shift+ArrowDown")
    told = heat_map.page.get_by_text(re.compile(r"^At rank \d+ on ")).inner_text()
    canvas.press("Enter")
    status = heat_map.page.get_by_role("main").get_by_role("status")
    rank = told.removeprefix("At ").partition(" on ")[0]
    wait_for(lambda: status.inner_text().startswith(rank), "the cell to be chosen")
    heat_map.is_fit_for_all()


def test_of_a_slow_rank_the_newest_step_that_it_has_done_is_chosen(
    chromium: Any, site: tuple[str, str]
) -> None:
    """Of the newest one of all, only its peers' times are known: it is the last to do it."""
    found = answer(site, "heat-map?measure=work")
    row = found["rows"][1]
    row["mean_ratio"] = 2.0
    row["seconds"][-2:], row["percents"][-2:] = [0.1, None], [200, None]
    visit = opened(chromium, site, "heat-map", found)
    slower = visit.page.get_by_role("region", name="Slower than their peers")
    slower.get_by_role("button", name="rank 1").click()
    visit.shows("2.00 of the median of its peers")
    assert (visit.complaints, visit.foreign) == ([], [])
