"""A page that stays open: logs, curves and a controller that is away, without a controller."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from controller.web.columns import columns_of
from controller.web.messages import as_json
from outlast.v1 import common_pb2, jobs_pb2, trends_pb2
from tests.e2e.cluster import wait_for
from tests.web.alone import HOST, Answers, Refusal, called, say, serve, visit_alone
from tests.web.browser import HURRIED, Visit

pytestmark = pytest.mark.usefixtures("closed_pages")

JOB_ID = "gpt-1"
CURVE, EVENTS = f"jobs/{JOB_ID}/curve", "/events"
# Charts as uPlot makes them, to be asked what they show.
PLOTS = """let real;
window.plots = [];
Object.defineProperty(window, "uPlot", {
  get: () => real,
  set: (found) => {
    real = new Proxy(found, { construct: (made, given) => {
      const plot = new made(...given);
      plots.push(plot);
      return plot;
    } });
  },
});
window.shownSteps = () => plots.filter((each) => each.root.isConnected)
  .map(({ scales: { x } }) => [x.min, x.max]);"""

# How many streams of a job were open when its curve was read.
READS = """window.streamsWhenRead = [];
const read = window.fetch.bind(window);
window.fetch = (url, ...rest) => {
  const open = [...streams].filter((each) => each.path.endsWith("/events"));
  if (url.includes("/curve")) streamsWhenRead.push(open.length);
  return read(url, ...rest);
};"""


def report(step: int, attempt: int, loss: float = 2.0, **given: Any) -> common_pb2.StepReport:
    return common_pb2.StepReport(
        step=step, attempt=attempt, loss=loss, tokens=100, duration_s=0.1, at_s=1e9, **given
    )


def curve_of(*reports: common_pb2.StepReport) -> dict[str, Any]:
    return {"num_steps": len(reports), "columns": columns_of(reports, 1000)}


def answers(curve: Any, job: Any = None) -> dict[str, Any]:
    """Of a controller that has one job."""
    state = jobs_pb2.Job(job_id=JOB_ID, state="RUNNING", attempt=1, ranks=2, total_steps=100)
    told = as_json(state)
    return {
        f"jobs/{JOB_ID}": job or {"job": told},
        CURVE: curve,
        "jobs": {"jobs": [told]},
        "incidents": {"incidents": []},
        f"jobs/{JOB_ID}/trends": as_json(trends_pb2.JobTrends(job_id=JOB_ID)),
        f"jobs/{JOB_ID}/history": {"states": [], "checkpoints": []},
    }


def opened(chromium: Any, given: Answers, **options: Any) -> Visit:
    visit = visit_alone(chromium, given, **options)
    visit.page.add_init_script(PLOTS)
    visit.open(f"/jobs/{JOB_ID}")
    return visit


def shown_losses(visit: Visit) -> dict[int, float]:
    """What the first chart draws, by step."""
    steps, losses = visit.page.evaluate("plots.find((each) => each.root.isConnected).data")[:2]
    return dict(zip(steps, losses, strict=True))


def test_steps_that_were_redone_while_nobody_looked_are_read_again(chromium: Any) -> None:
    """The stream begins behind the last step that the page has seen."""
    attempts = [[report(step, 1) for step in range(1, 61)]]
    attempts.append([report(step, 2, 1.0) for step in range(41, 46)])
    curves = iter((curve_of(*attempts[0]), curve_of(*attempts[0][:40], *attempts[1])))
    visit = visit_alone(chromium, answers(lambda: next(curves)))
    visit.page.add_init_script(HURRIED + PLOTS + READS)
    visit.open(f"/jobs/{JOB_ID}")
    wait_for(lambda: len(shown_losses(visit)) == 60, "the curve")
    say(visit, EVENTS, "error")
    wait_for(lambda: shown_losses(visit).get(45) == 1.0, "the curve to be read again")
    assert shown_losses(visit) == {step: 2.0 if step < 41 else 1.0 for step in range(1, 46)}
    urls = visit.page.evaluate("[...streams].map((each) => each.url)")
    assert any(url.endswith("events?after_step=60") for url in urls)
    # What is redone after it was read is in the stream.
    assert visit.page.evaluate("streamsWhenRead") == [0, 1]
    say(visit, EVENTS, "steps", [as_json(report(46, 2, 1.0))])
    wait_for(lambda: shown_losses(visit).get(46) == 1.0, "the next step")


def test_steps_that_a_restart_gave_up_are_no_part_of_a_curve() -> None:
    first, second = [report(step, 1) for step in (1, 2, 3)], [report(2, 2)]
    assert columns_of([first[0], *second, first[2]], 10)["step"] == [1, 2]
    assert columns_of([first[0], *second, first[2]], 10, range(2, 9))["step"] == [2]


def test_steps_that_a_restart_gave_up_leave_no_mark(chromium: Any) -> None:
    """Attempt 1 came to step 60; attempt 2 has redone five steps: only its own beginning is one."""
    page = chromium.new_page()
    serve(page, {})
    page.goto(HOST)
    first = [as_json(report(step, 1)) for step in range(1, 61)]
    curve = called(page, "curve", "withReports", called(page, "curve", "emptyCurve"), first)
    assert curve["step"] == [*range(1, 61)]
    for step in range(41, 46):
        curve = called(page, "curve", "withReports", curve, [as_json(report(step, 2))])
    assert curve["attempt"] == [1] * 40 + [2] * 5
    job = {"skipped": [], "chosen_starts": []}
    marks = called(page, "curve", "marksOf", job, curve, [])
    assert [(mark["step"], mark["text"]) for mark in marks] == [(41, "attempt 2 begins")]
    # A report of the old attempt that comes late changes nothing.
    assert called(page, "curve", "withReports", curve, [first[49]]) == curve


@pytest.mark.parametrize("every", [1, 2, 50])
def test_a_page_that_stays_open_keeps_so_many_steps(chromium: Any, every: int) -> None:
    page = chromium.new_page()
    serve(page, {})
    page.goto(HOST)
    found = page.evaluate(
        """async (every) => {
          const { emptyCurve, withReports } = await import("/page/curve.js");
          let [curve, most] = [emptyCurve(), 0];
          for (let first = 1; first < 40_000; first += 100) {
            const steps = [...Array(100).keys()].map((at) => first + at);
            curve = withReports(curve, steps.map((step) => {
              const report = { step, attempt: 1, loss: 2, tokens: 1, duration_s: 1 };
              const spike = step === 5000 ? 9 : 3 - step / 1e5;
              return step % every ? report : { ...report, eval_loss: spike };
            }));
            most = Math.max(most, curve.step.length);
          }
          const evaluated = curve.eval_loss.filter(Boolean);
          return [most, evaluated.includes(9), curve.step.at(-1), evaluated.length];
        }""",
        every,
    )
    most, has_spike, last, evaluated = found
    assert (most <= 6100, has_spike, last) == (True, True, 40_000)
    # Few evaluations all stay.
    assert every < 50 or evaluated == 800


def shows_steps(visit: Visit, first: int, last: int) -> None:
    """All charts show them, and say so."""
    visit.page.get_by_role(
        "img", name=re.compile(f"^Loss over steps {first} to {last};")
    ).wait_for()
    wait_for(
        lambda: {tuple(each) for each in visit.page.evaluate("shownSteps()")} == {(first, last)},
        f"all charts to show steps {first} to {last}",
    )


def test_a_zoom_outlasts_themes_and_what_comes(chromium: Any) -> None:
    visit = opened(chromium, answers(curve_of(*(report(step, 1) for step in range(1, 61)))))
    for label, step in (("From step", 20), ("to step", 30)):
        visit.page.get_by_label(label).fill(str(step))
        visit.page.keyboard.press("Enter")
    shows_steps(visit, 20, 30)
    visit.page.get_by_role("button", name=re.compile("^Theme")).click()
    shows_steps(visit, 20, 30)
    # A step of another attempt brings a mark in the same render.
    say(visit, EVENTS, "steps", [as_json(report(61, 2))])
    visit.page.locator("summary", has_text="1 marks").wait_for()
    shows_steps(visit, 20, 30)
    # The mouse chooses others, for all charts and the fields, too.
    chart = visit.page.locator("figure.chart .u-over").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] * 0.22, box["y"] + 50)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + box["width"] * 0.51, box["y"] + 60, steps=4)
    visit.page.mouse.up()
    shows_steps(visit, 22, 26)
    assert visit.page.get_by_label("From step").input_value() == "22"
    chart.dblclick()
    everything = {(1, 61)}
    wait_for(
        lambda: {tuple(each) for each in visit.page.evaluate("shownSteps()")} == everything,
        "all steps",
    )
    assert (visit.complaints, visit.foreign) == ([], [])


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_page_that_opens_while_the_controller_is_busy_tries_again(
    chromium: Any, status: int
) -> None:
    refusals = iter((Refusal(status, "it is starting"), None))
    given = answers(curve_of(report(1, 1)))
    known = given[f"jobs/{JOB_ID}"]
    given[f"jobs/{JOB_ID}"] = lambda: next(refusals, None) or known
    visit = visit_alone(chromium, given)
    visit.page.add_init_script(HURRIED)
    visit.open(f"/jobs/{JOB_ID}")
    visit.page.get_by_role("button", name="Show the logs").wait_for()
    assert visit.foreign == []


def test_a_page_waits_as_long_as_it_is_told_to(chromium: Any) -> None:
    times: list[float] = []
    given = answers(curve_of())
    known = given[f"jobs/{JOB_ID}"]

    def once_refused() -> Any:
        times.append(time.monotonic())
        return known if len(times) > 1 else Refusal(503, headers={"Retry-After": "3"})

    visit = opened(chromium, given | {f"jobs/{JOB_ID}": once_refused})
    visit.shows("it is a test")
    visit.page.get_by_role("button", name="Show the logs").wait_for()
    assert times[1] - times[0] >= 3


def test_a_page_asks_again_after_a_minute_at_most(chromium: Any) -> None:
    page = chromium.new_page()
    serve(page, {})
    page.goto(HOST)
    waits = page.evaluate(
        """async () => {
          const { ApiError, retryMs } = await import("/page/api.js");
          return [0, 30, 2592000].map((s) => retryMs(new ApiError(503, { message: "" }, s)));
        }"""
    )
    assert waits == [2000, 30_000, 60_000]


def test_a_path_that_is_no_text_is_not_found(chromium: Any) -> None:
    visit = visit_alone(chromium, {})
    visit.open("/jobs/%E0%A4%A")
    visit.page.get_by_role("heading", name="Not found").wait_for()
    visit.shows("There is no page /jobs/%E0%A4%A.")
    wait_for(lambda: visit.page.title() == "Not found · Outlast", "the title")
    visit.is_fit_for_all()


def test_no_two_series_of_a_chart_look_alike(chromium: Any) -> None:
    sets = {f"set {number}": 2.0 for number in range(30)}
    reports = [report(step, 1, eval_loss=2.0, eval_losses=sets) for step in (1, 2)]
    visit = opened(chromium, answers(curve_of(*reports)))
    legend = visit.page.locator("figure.chart").first.locator(".u-series")
    wait_for(lambda: legend.count() == 33, "a series for each set")
    looks = visit.page.evaluate(
        """plots.find((each) => each.root.isConnected).series.slice(1)
             .map((each) => [each._stroke, each.dash, each.width > 0].join(" "))"""
    )
    # The loss itself is a line, and the first sets are dots.
    assert len(set(looks)) == 32
    markers = legend.locator(".u-marker").evaluate_all(
        "all => all.slice(1).map((each) => each.style.border || each.style.background)"
    )
    assert len(markers) == 32
    series = [{"label": str(number)} for number in range(32)]
    found = called(visit.page, "charts", "looksOf", series)
    assert len({(look["color"], str(look["dash"]), look["border"]) for look in found}) == 32
