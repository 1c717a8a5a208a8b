"""What observing costs: the program itself, at sizes that take seconds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.observe import boxes, browser, fleet, links, pages
from bench.observe.claims import claims_of
from tests.web.browser import WHY_NOT


def test_what_a_page_loads_is_a_small_part_of_what_ranks_have_noted(tmp_path: Path) -> None:
    found = pages.measure(tmp_path, small=True)
    noted = found["noted_bytes"] * found["ranks"]
    assert found["heat_map"]["sent_bytes"] < noted / 50
    assert found["timeline"]["sent_bytes"] < noted / 10
    assert [each.claim for each in claims_of({"pages": found})] == [
        "heat map of 64 ranks: a processor of the controller, in threads",
        "heat map of 64 ranks: the answer, compressed",
        "timeline of 64 ranks: a processor of the controller, in threads",
        "timeline of 64 ranks: the answer, compressed",
    ]


def test_a_step_notes_each_pass_of_each_micro_batch_and_chunk(tmp_path: Path) -> None:
    found = boxes.measure(tmp_path, small=True)
    events = found["events"]
    assert events["pass"] == 2 * 8 * 2
    # Data, forward and backward, gradient sync, optimizer, checkpoint.
    assert events["phase"] == 5
    assert events["operation"] > events["pass"]
    assert all(each > 0 for each in found["event_ns"].values())
    (claim,) = claims_of({"boxes": found})
    assert claim.value == 100 * found["share_of_step"]


def test_messages_and_the_scrape_are_those_of_all_ranks(tmp_path: Path) -> None:
    found = asyncio.run(fleet.measure(tmp_path, small=True))
    assert found["scrape"]["bytes"] > 10_000
    asked = found["messages"]["asked"]
    assert set(asked) == {"job", "jobs", "watch", "ranks"}
    # Some hundred bytes for each of 160 ranks.
    assert asked["ranks"]["bytes"] > 16_000
    assert all(0 < each["loop_s"] <= each["total_s"] for each in asked.values())
    assert len(claims_of({"fleet": found})) == 2


@pytest.mark.skipif(not browser.is_there(), reason=WHY_NOT)
def test_the_heat_map_is_painted_and_moves_in_a_browser(tmp_path: Path) -> None:
    found = browser.measure(tmp_path, small=True)
    opened, pan = found["open"], found["pan"]
    assert 0 < opened["received_s"] < opened["paint_s"] < opened["whole_s"]
    # So few ranks are one answer, and one picture.
    assert opened["first_s"] == opened["whole_s"]
    assert opened["sent_bytes"] < opened["bytes"]
    assert 0 < pan["drawn_per_s"] <= pan["moves_per_s"] + pan["frames_per_s"]
    sent = {name: each["sent_bytes"] for name, each in found["answers"].items()}
    # Of a job that has something behind it.
    assert 50_000 < sent["jobs/JOB/curve"] < 200_000
    assert sent["jobs/JOB/history"] > 1000
    assert all(nbytes > 200 for nbytes in sent.values())
    assert len(claims_of({"browser": found})) == 4


def test_each_link_is_read_every_few_milliseconds(tmp_path: Path) -> None:
    found = links.measure(tmp_path, small=True)
    (node,) = found["nodes"]
    assert node["links"] == 2
    assert 0 < node["share_of_core"] < 0.2
    # Longer than it sleeps, where the machine is busy.
    assert 0.001 < node["interval_s"] < 0.5
    share, interval = claims_of({"links": found})
    assert share.value == 100 * node["share_of_core"]
    assert interval.value == 1000 * node["interval_s"]
