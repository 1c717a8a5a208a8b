"""The editor of job specs: which field is where in a text, and what it offers there.

The page's own scripts run in the browser, with the schema of specs; no controller is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from outlast.spec import JobSpec
from tests.web.alone import HOST, Refusal, called, serve

SPEC = """\
name: my-job # a: comment
steps: 200
model: {layers: 4, hidden: 128, # x: y
  heads: 4}
parallel:
  dp: 2
  zero:
    level: 1

data:
  blend_changes:
  - step: 1
    weights: {a: 1}
  - step: 2
workload:
  command: [python, "a: b"]
  env: {A: "x: y"}
text: |
  a: b
last: 1
"""


@pytest.fixture(scope="module")
def page(chromium: Any) -> Iterator[Any]:
    """A page that has the scripts of ours, and answers of a controller that takes every spec."""
    opened = chromium.new_page()
    serve(opened, answers_of(JobSpec.model_json_schema()))
    opened.goto(f"{HOST}/submit")
    yield opened
    opened.close()


def answers_of(schema: Any) -> dict[str, Any]:
    """Of a controller; without a schema that one request fails."""
    return {
        "spec-schema": schema or Refusal(503),
        "plan": {"plan": None, "reason": "it is a test", "devices": []},
        "jobs/check": {
            "connected": 1,
            "fitting": 1,
            "needed": 1,
            "need": "1 worker place",
            "nodes": "",
            "brings_nodes": False,
            "problems": [],
        },
    }


def fields_of(page: Any, text: str) -> list[str]:
    found = called(page, "spectext", "fieldsOf", text)
    return [f"{each['line']} {'.'.join(each['path'])}" for each in found]


def test_every_field_has_its_line(page: Any) -> None:
    assert fields_of(page, SPEC) == [
        "1 name",
        "2 steps",
        "3 model",
        "3 model.layers",
        "3 model.hidden",
        "4 model.heads",
        "5 parallel",
        "6 parallel.dp",
        "7 parallel.zero",
        "8 parallel.zero.level",
        "10 data",
        "11 data.blend_changes",
        "12 data.blend_changes.step",
        "13 data.blend_changes.weights",
        "13 data.blend_changes.weights.a",
        "14 data.blend_changes.step",
        "15 workload",
        "16 workload.command",
        "17 workload.env",
        "17 workload.env.A",
        "18 text",
        "20 last",
    ]
    written_as_json = '{"name": "a",\n "model": {"layers": 4}, "l": [1, 2]}'
    assert fields_of(page, written_as_json) == ["1 name", "2 model", "2 model.layers", "2 l"]


def test_braces_that_are_still_open_hide_nothing_below(page: Any) -> None:
    assert fields_of(page, "model: {layers: 4, hid\nsteps: 3\n") == [
        "1 model",
        "1 model.layers",
        "2 steps",
    ]


def test_a_problem_is_at_its_field_or_the_section_that_lacks_it(page: Any) -> None:
    fields = called(page, "spectext", "fieldsOf", SPEC)
    names = ("parallel.zero.level", "parallel.tp", "data.blend_changes[1].weights", "nowhere")
    found = [called(page, "spectext", "lineOf", fields, name) for name in names]
    assert found == [8, 5, 13, None]


# `|` is the cursor: the section or field, whether a value stands there, and what is replaced.
@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("na|", ("", False, "na")),
        ("name: a\npre|cision: x", ("", False, "precision")),
        ("precision: b|f16 # c", ("precision", True, "bf16")),
        ("precision: |", ("precision", True, "")),
        ("model: {la|", ("model", False, "la")),
        ("model: {layers: 4, |}", ("model", False, "")),
        ("model: {|layers: 2}", ("model", False, "layers")),
        ("model: {block: ser|ial}", ("model.block", True, "serial")),
        ("model: {moe: {num|: 3}}", ("model.moe", False, "num")),
        ("model: {rope_pattern: [ro|]}", ("model.rope_pattern", True, "ro")),
        ("model: {layers: 4, hid|\nsteps: 3", ("model", False, "hid")),
        ("parallel:\n  |\ndata: {}", ("parallel", False, "")),
        ("parallel:\n  zero:\n    le|", ("parallel.zero", False, "le")),
        ("parallel:\n  zero:\n    level: 1\n  |", ("parallel", False, "")),
        ("parallel:\n|", ("", False, "")),
        ("data:\n  blend_changes:\n  - st|", ("data.blend_changes", False, "st")),
        ("data:\n  blend_changes:\n  - step: 1\n    |", ("data.blend_changes", False, "")),
        ("steps: 1 # he|re", None),
    ],
)
def test_the_place_of_the_cursor(
    page: Any, marked: str, expected: tuple[str, bool, str] | None
) -> None:
    text, cursor = marked.replace("|", ""), marked.index("|")
    found = called(page, "spectext", "placeAt", text, cursor)
    if expected is None:
        assert found is None
        return
    written = text[found["from"] : found["to"]]
    assert (".".join(found["path"]), found["isValue"], written) == expected


def test_a_field_is_described_by_the_schema(page: Any) -> None:
    schema = JobSpec.model_json_schema()
    found = called(page, "specschema", "described", schema, ["parallel", "tp"])
    assert (found["kind"], found["byDefault"]) == ("whole number, 1 or more", "1")
    assert found["what"] == "Tensor-parallel degree."
    schedule = called(page, "specschema", "described", schema, ["parallel", "schedule"])
    assert schedule["values"] == ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
    assert called(page, "specschema", "described", schema, ["nobody"]) is None


def test_names_and_values_are_completed_with_the_keyboard(page: Any) -> None:
    page.goto(f"{HOST}/submit")
    spec = page.get_by_label("Job spec")
    spec.fill("")
    spec.press_sequentially("paral")
    options = page.get_by_role("listbox").get_by_role("option")
    options.filter(has_text="parallel").wait_for()
    spec.press("Control+Space")
    spec.press("Enter")
    assert spec.input_value() == "parallel: "
    spec.press_sequentially("{sch")
    spec.press("Control+Space")
    spec.press("Enter")
    page.get_by_text("Pipeline schedule.").wait_for()
    spec.press("Control+Space")
    options.filter(has_text="gpipe").wait_for()
    spec.press("ArrowDown")
    chosen = page.get_by_role("listbox").get_by_role("option", selected=True)
    assert chosen.inner_text().split() == ["1f1b"]
    spec.press("Escape")
    spec.press("Control+Space")
    spec.press("Enter")
    assert spec.input_value() == "parallel: {schedule: gpipe"
    # What is there is not offered again; Tab leaves the editor.
    spec.press_sequentially(", sch")
    options.first.wait_for(state="detached")
    spec.press("Tab")
    assert page.evaluate("document.activeElement.id") != "spec"


def test_without_the_schema_a_spec_is_written_and_checked(chromium: Any) -> None:
    opened = chromium.new_page()
    serve(opened, answers_of(None))
    opened.goto(f"{HOST}/submit")
    opened.get_by_text("No hints: the schema of specs did not load.").wait_for()
    opened.get_by_label("Job spec").fill("name: a")
    opened.get_by_text("The spec is right.").wait_for()
    opened.close()
