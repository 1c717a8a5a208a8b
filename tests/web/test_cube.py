"""The picture of a job's ranks: what glows, what arrows say, and that it can be turned."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from controller.web.messages import as_json
from outlast.v1 import ranks_pb2
from tests.web.alone import called, visit_alone
from tests.web.browser import Visit
from tests.web.glow import WATCH, Point, arrows, glowing

pytestmark = pytest.mark.usefixtures("closed_pages")

JOB_ID = "gpt-1"
TP, PP, DP = 2, 2, 3
STOPPED, NUM_RANKS = 3, TP * PP * DP
# Some that were turned by hand, each of which hides no rank.
VIEWS = [(0, 37), (90, 37), (135, 60), (200, 90), (313, 10)]
# Of a pixel of the picture.
EXACT_PX = 1.5
# An arrow's curve ends where its head begins.
HEAD_PX = 8


def hanging() -> dict[str, Any]:
    """Ranks of which one was stopped; the others of its tensor group wait in an operation that it
    has not entered."""
    answer = ranks_pb2.ListRanksResponse(
        num_ranks=NUM_RANKS, attempt=1, tp=TP, pp=PP, dp=DP, ep=1, cp=1
    )
    for number in range(NUM_RANKS):
        rank = answer.ranks.add(
            rank=number,
            node=f"node-{number // 2}",
            tp=number % TP,
            dp=number // TP % DP,
            pp=number // TP // DP,
            phase="forward_backward",
            completed_step=9,
            stalled_s=8,
            stall_limit_s=10,
            process_state="T" if number == STOPPED else "S",
            entered={"tp": 6 if number == STOPPED else 7},
        )
        operation = ranks_pb2.WaitingOperation(op="all_reduce", group="tp", sequence=7, detail=-1)
        operation.is_inside = number == STOPPED - 1
        rank.last_operation.CopyFrom(operation)
    found: dict[str, Any] = as_json(answer)
    return found


@pytest.fixture
def cube(chromium: Any) -> Visit:
    visit = visit_alone(chromium, {f"jobs/{JOB_ID}/ranks": hanging()})
    visit.page.add_init_script(WATCH)
    visit.open(f"/jobs/{JOB_ID}/ranks")
    visit.shows(f"Rank {STOPPED} on node-1")
    return visit


def view_of(visit: Visit) -> tuple[int, int]:
    """By how many degrees the picture is turned and tilted, as its label says."""
    label = visit.page.get_by_role("application").get_attribute("aria-label")
    turn, tilt = re.findall(r"(\d+)°", label)
    return int(turn), int(tilt)


def centers(visit: Visit, view: tuple[int, int]) -> list[Point]:
    """Where the middle of each rank is, of a picture that is seen so."""
    width = visit.page.get_by_role("application").evaluate("canvas => canvas.clientWidth")
    found = visit.page.evaluate(
        """async ([layout, width, turn, tilt]) => {
          const { geometry } = await import("/page/cube.js");
          const { corner, dp, tp } = geometry(layout, width, { turn, tilt });
          return layout.ranks.map((each) => corner(each.pp, each.dp, each.tp))
            .map(([x, y]) => [x + (dp[0] + tp[0]) / 2, y + (dp[1] + tp[1]) / 2]);
        }""",
        [hanging(), width, *view],
    )
    return [(x, y) for x, y in found]


def near(one: Point, other: Point, within_px: float = EXACT_PX) -> bool:
    return max(abs(one[0] - other[0]), abs(one[1] - other[1])) < within_px


def test_the_rank_that_holds_up_others_glows_and_an_arrow_leads_to_it(cube: Visit) -> None:
    middle = centers(cube, view_of(cube))
    (glow,) = glowing(cube)
    assert near(glow, middle[STOPPED])
    ((begun, ended),) = arrows(cube)
    assert near(begun, middle[STOPPED - 1])
    assert near(ended, middle[STOPPED], HEAD_PX)
    cube.page.get_by_role("button", name="Turn right").click()
    turned = centers(cube, view_of(cube))
    assert not near(turned[STOPPED], middle[STOPPED])
    assert near(glowing(cube)[0], turned[STOPPED])
    assert near(arrows(cube)[0][1], turned[STOPPED], HEAD_PX)
    cube.is_fit_for_all()


def test_it_is_turned_by_a_drag_by_keys_and_by_buttons(cube: Visit) -> None:
    canvas, mouse = cube.page.get_by_role("application"), cube.page.mouse
    front = view_of(cube)
    assert front == (0, 37)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 60
    mouse.move(x, y)
    mouse.down()
    mouse.move(x + 60, y + 20, steps=3)
    mouse.up()
    assert view_of(cube) == (30, 47)
    assert cube.page.get_by_role("heading", name=re.compile(r"^Rank \d+$")).count() == 0
    for key, view in (
        ("Shift+ArrowRight", (45, 47)),
        ("Shift+ArrowLeft", (30, 47)),
        ("Shift+ArrowDown", (30, 62)),
        ("Shift+ArrowUp", (30, 47)),
        ("Home", front),
        ("Shift+ArrowLeft", (345, 37)),
    ):
        canvas.press(key)
        assert view_of(cube) == view, key
    for button, view in (
        ("Turn left", (330, 37)),
        ("Turn right", (345, 37)),
        ("Tilt forward", (345, 52)),
        ("Tilt back", (345, 37)),
        ("Front view", front),
    ):
        cube.page.get_by_role("button", name=button, exact=True).click()
        assert view_of(cube) == view, button
    # It goes no further than what can still be chosen from.
    for _ in range(9):
        canvas.press("Shift+ArrowUp")
    assert view_of(cube) == (0, 10)
    cube.is_fit_for_all()


@pytest.mark.parametrize("view", VIEWS)
def test_every_rank_is_chosen_where_it_is_seen(cube: Visit, view: tuple[int, int]) -> None:
    canvas = cube.page.get_by_role("application")
    layout = hanging()
    width = canvas.evaluate("canvas => canvas.clientWidth")
    for rank, (x, y) in enumerate(centers(cube, view)):
        script = f"""async () => {{
          const {{ geometry, rankAt }} = await import("/page/cube.js");
          const layout = {json.dumps(layout)};
          const shape = geometry(layout, {width}, {{ turn: {view[0]}, tilt: {view[1]} }});
          return rankAt(shape, layout, {x}, {y});
        }}"""
        assert cube.page.evaluate(script) == rank


def test_a_click_chooses_what_is_there_when_it_is_turned(cube: Visit) -> None:
    canvas = cube.page.get_by_role("application")
    for key in ["Shift+ArrowRight"] * 9 + ["Shift+ArrowDown"]:
        canvas.press(key)
    for rank, (x, y) in enumerate(centers(cube, view_of(cube))):
        canvas.click(position={"x": x, "y": y})
        cube.page.get_by_role("heading", name=f"Rank {rank}", exact=True).wait_for()


def test_a_large_job_fits_a_canvas_however_it_is_turned(cube: Visit) -> None:
    for layout in ({"tp": 8, "pp": 16, "dp": 80}, {"tp": 1, "pp": 1, "dp": 1000}):
        for turn in (0, 45, 90, 180):
            view = {"turn": turn, "tilt": 90}
            shape = called(cube.page, "cube", "geometry", layout, 1200, view)
            assert shape["height"] <= 10_000, (layout, turn)
