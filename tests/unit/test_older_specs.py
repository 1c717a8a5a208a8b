"""What agents of the previous release are given of a spec, and that nothing of it is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.presets import PRESETS
from outlast.spec.older import KNOWN, for_agents
from outlast.spec.parse import accepted_spec

_JOURNAL = Path(__file__).parents[1] / "controller" / "core" / "journals" / "left_by_0_1_0.jsonl"
_SMALL = {"layers": 2, "hidden": 32, "heads": 2}


def spec_of_0_1_0() -> dict[str, Any]:
    """Every field of that release, as its controller wrote them."""
    *_, row = _JOURNAL.read_text().splitlines()
    document: dict[str, Any] = json.loads(json.loads(row)["job"]["spec_json"])
    return document


def names(section: dict[str, Any], within: str = "") -> dict[str, frozenset[str]]:
    found = {within: frozenset(section)}
    for name, value in section.items():
        if isinstance(value, dict):
            found |= names(value, f"{within}.{name}" if within else name)
    return found


def test_the_fields_of_the_previous_release_are_all_known() -> None:
    recorded = names(spec_of_0_1_0())
    # A number then, a section now.
    recorded["parallel"] -= {"zero"}
    assert recorded == KNOWN


def test_a_job_that_uses_nothing_new_has_no_field_that_0_1_0_would_refuse() -> None:
    spec = accepted_spec(spec_of_0_1_0())
    given = json.loads(for_agents(spec.canonical_json()))
    then = spec_of_0_1_0()
    assert then["parallel"].pop("zero") == 0
    assert given == then
    # One that does has just that.
    new = spec.model_copy(update={"garbage_interval_steps": 7})
    assert json.loads(for_agents(new.canonical_json())) == {**then, "garbage_interval_steps": 7}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": {"dp": 2, "zero": {"level": 2}}, "data": {"global_batch": 4}},
        {"resources": {"nodes": 1, "workers_per_node": 1}},
        {"model": {**_SMALL, "moe": {"num_experts": 4}, "window": 8}},
        {"detectors": {"hang": "off"}, "queue": {"priority": 3}},
        {"recovery": {"hang_timeout_s": 300}, "workload": {"command": ["python", "/x.py"]}},
        *({"model": {"preset": name, "norm": "layernorm"}} for name in PRESETS),
    ],
    ids=str,
)
def test_what_agents_read_is_what_the_controller_keeps(sections: dict[str, Any]) -> None:
    spec = accepted_spec({"name": "job", **sections})
    assert accepted_spec(json.loads(for_agents(spec.canonical_json()))) == spec


def test_a_script_reads_settings_that_are_as_they_are_without() -> None:
    """`outlast.session` does, by itself, in an image that may be older than the agent."""
    spec = accepted_spec({"name": "job", "workload": {"command": ["python", "/x.py"]}})
    assert for_agents(spec.canonical_json()) == spec.canonical_json()
