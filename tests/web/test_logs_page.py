"""The logs of a job's page: followed, read further up, and copied, without a controller."""

from __future__ import annotations

from typing import Any

import pytest

from controller.web.messages import as_json
from outlast.v1 import jobs_pb2
from tests.e2e.cluster import wait_for
from tests.web.alone import HOST, say, serve
from tests.web.browser import HURRIED, Visit
from tests.web.test_live_page import EVENTS, JOB_ID, answers, curve_of, opened

pytestmark = pytest.mark.usefixtures("closed_pages")

LOGS = "/logs/events"
# The stream of logs, if it is open.
OWN = "[...streams].find((each) => each.path.endsWith('/logs/events'))"


def log_chunk(text: str, rank: int = 0, **given: Any) -> dict[str, Any]:
    chunk = jobs_pb2.LogsResponse(node="node-0", rank=rank, attempt=1, data=text.encode(), **given)
    found: dict[str, Any] = as_json(chunk)
    return found


def numbered(lines: range) -> str:
    return "".join(f"line {number}\n" for number in lines)


@pytest.fixture
def logs(chromium: Any) -> tuple[Visit, Any]:
    """A job's page whose logs are shown, and their box."""
    visit = opened(chromium, answers(curve_of()))
    visit.page.evaluate(HURRIED)
    visit.page.get_by_role("button", name="Show the logs").click()
    box = visit.page.get_by_label("Output of ranks")
    box.wait_for()
    return visit, box


def distance_to_end(box: Any) -> float:
    script = "each => each.scrollHeight - each.scrollTop - each.clientHeight"
    return float(box.evaluate(script))


def test_logs_are_followed_from_their_first_tail_on(logs: tuple[Visit, Any]) -> None:
    visit, box = logs
    say(visit, LOGS, "chunk", log_chunk(numbered(range(700))))
    visit.shows("700 lines")
    assert distance_to_end(box) < 2
    say(visit, LOGS, "chunk", log_chunk(numbered(range(700, 740))))
    visit.shows("740 lines")
    assert distance_to_end(box) < 2
    # Who has scrolled up reads there, and comes back by scrolling down.
    box.evaluate("each => { each.scrollTop = 1000; }")
    say(visit, LOGS, "chunk", log_chunk(numbered(range(740, 760))))
    visit.shows("760 lines")
    assert box.evaluate("each => each.scrollTop") == 1000
    box.evaluate("each => { each.scrollTop = each.scrollHeight; }")
    # Also when there are so many that old ones go.
    for first in range(760, 7000, 2080):
        say(visit, LOGS, "chunk", log_chunk(numbered(range(first, first + 2080))))
    visit.shows("line 6999")
    assert distance_to_end(box) < 2


def test_another_choice_begins_with_an_empty_box(logs: tuple[Visit, Any]) -> None:
    visit, _ = logs
    say(visit, LOGS, "chunk", log_chunk(numbered(range(700))))
    visit.shows("700 lines")
    visit.page.get_by_label("Search whole logs").fill("line 6")
    visit.page.keyboard.press("Enter")
    visit.shows("No line that was read is of this kind.")
    visit.shows("0 lines")
    visit.is_fit_for_all()


def test_a_last_line_that_has_not_ended_is_shown(logs: tuple[Visit, Any]) -> None:
    visit, box = logs

    def lines() -> list[str]:
        return str(box.inner_text()).splitlines()

    say(visit, LOGS, "chunk", log_chunk("first\nstep 1 "))
    say(visit, LOGS, "chunk", log_chunk("killed", rank=1))
    visit.shows("killed")
    assert lines() == ["[rank 0] first", "[rank 0] step 1 ", "[rank 1] killed"]
    say(visit, LOGS, "chunk", log_chunk("of 2\n"))
    visit.shows("step 1 of 2")
    assert lines() == ["[rank 0] first", "[rank 0] step 1 of 2", "[rank 1] killed"]
    say(visit, LOGS, "end")
    assert lines()[-1] == "[rank 1] killed"


def test_a_line_that_never_ends_is_cut(logs: tuple[Visit, Any]) -> None:
    visit, box = logs
    say(visit, LOGS, "chunk", log_chunk("x" * 70_000))
    say(visit, LOGS, "chunk", log_chunk("y\n"))
    visit.shows("2 lines")
    assert str(box.inner_text()).endswith("x\n[rank 0] y")


def first_seen(box: Any) -> str:
    """The line at the top of what is seen."""
    script = """each => {
      const { left, top } = each.getBoundingClientRect();
      const { offsetNode, offset } = document.caretPositionFromPoint(left + 40, top + 20);
      const lines = offsetNode.textContent;
      return lines.slice(lines.lastIndexOf("\\n", offset) + 1).split("\\n")[0];
    }"""
    return str(box.evaluate(script))


def scrolled_up(visit: Visit, box: Any) -> str:
    """After 5,000 lines in the middle; the line that is there."""
    for first in range(0, 5000, 500):
        say(visit, LOGS, "chunk", log_chunk(numbered(range(first, first + 500))))
    visit.shows("5000 lines")
    box.evaluate("each => { each.scrollTop = each.scrollHeight / 2; }")
    reads = first_seen(box)
    assert reads.startswith("[rank 0] line 25")
    return reads


def test_who_reads_further_up_is_not_moved(logs: tuple[Visit, Any]) -> None:
    visit, box = logs
    reads = scrolled_up(visit, box)
    for first in range(5000, 11_000, 500):
        say(visit, LOGS, "chunk", log_chunk(numbered(range(first, first + 500))))
    wait_for(lambda: "line 10999\n" in f"{box.inner_text()}\n", "the newest lines")
    # The oldest ones go, and the others stay where they are seen.
    visit.shows("10000 lines")
    assert first_seen(box) == reads
    box.evaluate("each => { each.scrollTop = each.scrollHeight; }")
    say(visit, LOGS, "chunk", log_chunk("last\n"))
    wait_for(lambda: "rank 0] last" in box.inner_text(), "the last line")
    assert distance_to_end(box) < 2


def test_who_reads_further_up_stays_there_when_the_connection_is_lost(
    logs: tuple[Visit, Any],
) -> None:
    visit, box = logs
    reads = scrolled_up(visit, box)
    say(visit, LOGS, "error")
    wait_for(lambda: visit.page.evaluate(f"Boolean({OWN})"), "another stream")
    assert first_seen(box) == reads
    say(visit, LOGS, "chunk", log_chunk(numbered(range(4990, 5010))))
    visit.shows("5021 lines")
    assert first_seen(box) == reads
    assert "line 4999\n[connected again: the newest lines from here on]\n" in box.inner_text()
    # At the end the newest lines take the place of all others, once they are there.
    box.evaluate("each => { each.scrollTop = each.scrollHeight; }")
    say(visit, LOGS, "error")
    wait_for(lambda: visit.page.evaluate(f"Boolean({OWN})"), "another stream")
    visit.shows("5021 lines")
    say(visit, LOGS, "chunk", log_chunk(numbered(range(20))))
    visit.shows("20 lines")
    assert distance_to_end(box) < 2


def test_text_that_is_selected_stays_so_while_lines_come(logs: tuple[Visit, Any]) -> None:
    visit, box = logs
    say(visit, LOGS, "chunk", log_chunk(numbered(range(40)) + "begun"))
    visit.shows("41 lines")
    box.evaluate("each => getSelection().selectAllChildren(each)")
    chosen = visit.page.evaluate("String(getSelection())")
    say(visit, LOGS, "chunk", log_chunk("\n" + numbered(range(40, 60))))
    visit.shows("41 lines, new ones wait while text is selected")
    assert visit.page.evaluate("String(getSelection())") == chosen
    assert chosen.endswith("line 39\n[rank 0] begun")
    visit.page.evaluate("getSelection().empty()")
    wait_for(lambda: "begun\n[rank 0] line 40\n" in box.inner_text(), "the new lines")
    visit.shows("61 lines")
    assert visit.page.get_by_text("wait while").count() == 0
    assert distance_to_end(box) < 2


def test_only_lines_with_a_text_are_shown(logs: tuple[Visit, Any]) -> None:
    visit, box = logs
    say(visit, LOGS, "chunk", log_chunk(numbered(range(40))))
    field = visit.page.get_by_label("Show only")
    field.fill("LINE 1")
    visit.shows("11 lines")
    say(visit, LOGS, "chunk", log_chunk("line 1\nother\n"))
    visit.shows("12 lines")
    assert "other" not in box.inner_text()
    field.fill("")
    visit.shows("42 lines")
    field.fill("nothing")
    visit.shows("No line that was read is of this kind.")


def test_lines_that_do_not_end_are_bounded(chromium: Any) -> None:
    page = chromium.new_page()
    serve(page, {})
    page.goto(HOST)
    script = """async ([ranks, text]) => {
      const { lineMaker } = await import("/page/views/logs.js");
      const { take, open } = lineMaker(false);
      const whole = [];
      for (let rank = 0; rank < ranks; rank += 1) whole.push(...take({ attempt: 1, rank, text }));
      return [whole.length, open().length];
    }"""
    assert page.evaluate(script, [1000, "x"]) == [744, 256]
    assert page.evaluate(script, [100, "x" * 2**16]) == [84, 16]


def test_who_reads_what_an_attempt_left_stays_there_in_the_next(logs: tuple[Visit, Any]) -> None:
    visit, box = logs
    reads = scrolled_up(visit, box)
    job = answers(curve_of())[f"jobs/{JOB_ID}"]["job"]
    before = visit.page.evaluate_handle(OWN)
    say(visit, EVENTS, "job", job | {"attempt": 2})
    is_another = f"before => {OWN} && {OWN} !== before"
    wait_for(lambda: visit.page.evaluate(is_another, before), "another stream")
    say(visit, LOGS, "chunk", log_chunk("of attempt 2\n"))
    visit.shows("5002 lines")
    assert first_seen(box) == reads
