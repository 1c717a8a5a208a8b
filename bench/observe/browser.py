"""The heat map of 10,000 ranks by 1,000 steps in a browser: when it is there, and how it moves.

Chromium on the page of `site`, each a process of its own.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.controller.fleet import JOB, WORKERS

NUM_NODES, SMALL_NODES = 1250, 4
NUM_STEPS, SMALL_STEPS = 1000, 50
# Of the job's curve.
PAST_STEPS, SMALL_PAST = 100_000, 2000
_ROUNDS = 3
_PANNED_S = 4.0
# Of the mouse, sent by the browser's driver one after the other: each waits for the one before.
_MOVES = 30
_VIEWPORT = {"width": 1280, "height": 900}
_DEADLINE_S = 120.0
# What pages ask of a job, besides heat map and timeline, with the parameters that they give.
_ANSWERS = (
    *("jobs", "jobs/JOB", "jobs/JOB/ranks", "jobs/JOB/curve", "jobs/JOB/history"),
    *("jobs/JOB/trends", "incidents?job=JOB&newest=50&brief=true"),
    *("nodes?most=100", "incidents?newest=100&brief=true", "node-statistics?node=node-00001"),
)

# As the page asks at first; of more ranks the map of all of them comes behind it.
_FIRST_RANKS = 512
# When the map was drawn and its frame was over; each frame, and each time that it was drawn.
_WATCH = """
window.seen = { drawn: [], frames: [], painted: [] };
const drawImage = CanvasRenderingContext2D.prototype.drawImage;
CanvasRenderingContext2D.prototype.drawImage = function (...given) {
  drawImage.apply(this, given);
  if (!this.canvas.classList?.contains("heat")) return;
  const at = performance.now();
  if (seen.painted.length < 10) {
    requestAnimationFrame(() => setTimeout(() => seen.painted.push([at, performance.now()])));
  }
  seen.drawn.push(at);
};
const frame = (now) => { seen.frames.push(now); requestAnimationFrame(frame); };
requestAnimationFrame(frame);
"""
# All from the navigation on, but for how long the last answer took to come and to be painted.
_TIMES = """(number) => {
  const all = performance.getEntriesByType("resource");
  const asked = all.filter((each) => each.name.includes("/heat-map?"));
  const last = asked[number - 1];
  const whole = last && seen.painted.find(([at]) => at > last.responseEnd);
  if (!whole) return null;
  return {
    first_s: seen.painted[0][1] / 1000,
    first_answer_s: (asked[0].responseEnd - asked[0].requestStart) / 1000,
    whole_s: whole[1] / 1000,
    answer_s: (last.responseStart - last.requestStart) / 1000,
    received_s: (last.responseEnd - last.responseStart) / 1000,
    paint_s: (whole[1] - last.responseStart) / 1000,
    sent_bytes: last.encodedBodySize,
    bytes: last.decodedBodySize,
  };
}"""


def is_there() -> bool:
    """Whether there is a browser, and what drives it."""
    return bool(shutil.which("chromium")) and importlib.util.find_spec("playwright") is not None


def measure(folder: Path, *, small: bool) -> dict[str, Any]:
    """Seconds until the map is there, frames a second while it moves, and bytes of answers."""
    num_nodes, num_steps = (SMALL_NODES, SMALL_STEPS) if small else (NUM_NODES, NUM_STEPS)
    past_steps = SMALL_PAST if small else PAST_STEPS
    num_answers = 1 + (num_nodes * WORKERS > _FIRST_RANKS)
    with _site(folder, num_nodes, num_steps, past_steps) as (base, pid):
        url = f"{base}/jobs/{JOB}/heat-map"
        with _chromium() as browser:
            rounds = 1 if small else _ROUNDS
            opened = [_opened(browser, url, pid, num_answers) for _ in range(rounds)]
            frames = _panned(browser, url, num_answers, 1.0 if small else _PANNED_S)
        answers = {each: _sizes(f"{base}/api/v1/{each.replace('JOB', JOB)}") for each in _ANSWERS}
    return {
        "ranks": num_nodes * WORKERS,
        "steps": num_steps,
        "past_steps": past_steps,
        "open": {name: statistics.median(each[name] for each in opened) for name in opened[0]},
        "pan": frames,
        "answers": answers,
    }


@contextmanager
def _site(folder: Path, *sizes: int) -> Iterator[tuple[str, int]]:
    """Where the page is, and the process that serves it."""
    command = [sys.executable, "-m", "bench.observe.site", str(folder), *map(str, sizes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as site:
        assert site.stdout is not None
        try:
            yield f"http://{site.stdout.readline().strip()}", site.pid
        finally:
            site.kill()


def _sizes(url: str) -> dict[str, int]:
    """As sent to who accepts compression, and whole."""
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        sent = answer.read()
        whole = gzip.decompress(sent) if answer.headers["Content-Encoding"] == "gzip" else sent
    return {"bytes": len(whole), "sent_bytes": len(sent)}


@contextmanager
def _chromium() -> Iterator[Any]:
    driver = importlib.import_module("playwright.sync_api")
    with driver.sync_playwright() as playwright:
        # Root, as which containers run, has no sandbox.
        launched = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        try:
            yield launched
        finally:
            launched.close()


def _page(browser: Any, url: str, num_answers: int) -> tuple[Any, dict[str, float]]:
    """The page with the map of all ranks, and how long that took."""
    page = browser.new_page(viewport=_VIEWPORT)
    page.add_init_script(_WATCH)
    page.goto(url)
    deadline_s = time.monotonic() + _DEADLINE_S
    # Not by a function of the page's own, which would have to be made of text there.
    while not (found := page.evaluate(_TIMES, num_answers)):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no heat map within {_DEADLINE_S:g} s")
        page.wait_for_timeout(50)
    return page, found


def _opened(browser: Any, url: str, pid: int, num_answers: int) -> dict[str, float]:
    before_s = _cpu_s(pid)
    page, found = _page(browser, url, num_answers)
    page.close()
    # Of a machine that does other things, too, this says more than the time until the answer.
    return {**found, "server_cpu_s": _cpu_s(pid) - before_s}


def _cpu_s(pid: int) -> float:
    # Behind the name, which may have spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _panned(browser: Any, url: str, num_answers: int, seconds: float) -> dict[str, float]:
    """Zoomed in by the wheel, dragged by the mouse to and fro, for so long."""
    page, _ = _page(browser, url, num_answers)
    box = page.locator("canvas.heat").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    for _ in range(6):
        page.mouse.wheel(0, -100)
    page.mouse.down()
    page.evaluate("() => { seen.drawn = [0]; seen.frames = []; }")
    begun_s, moves = time.monotonic(), 0
    while (passed_s := time.monotonic() - begun_s) < seconds:
        # To and fro, so that something new is seen with each move.
        by = 0 if moves % (2 * _MOVES) else 150
        page.mouse.move(x - by, y - by / 2, steps=_MOVES)
        moves += _MOVES
    drawn, frames = page.evaluate("() => [seen.drawn.slice(1), seen.frames]")
    page.mouse.up()
    page.close()
    gaps = [after - before for before, after in itertools.pairwise(frames)]
    return {
        "seconds": passed_s,
        "moves_per_s": moves / passed_s,
        "frames_per_s": len(frames) / passed_s,
        "drawn_per_s": len(drawn) / passed_s,
        "longest_frame_s": max(gaps) / 1000,
    }
