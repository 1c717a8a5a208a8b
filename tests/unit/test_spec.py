"""The job spec: defaults, and one clear line for everything that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outlast.cli.specfile import set_value
from outlast.problems import SpecError
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec


def problems(document: object) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(document)
    return {problem.field: problem.message for problem in caught.value.problems}


def test_only_the_name_is_required() -> None:
    spec = parse_spec({"name": "tiny"})
    assert spec.layout.world_size == 1
    assert spec.num_nodes == 1


def test_missing_name_is_named() -> None:
    assert problems({}) == {"name": "is required"}


def test_unknown_field_lists_the_allowed_ones() -> None:
    found = problems({"name": "a", "parallel": {"tpp": 2}})
    assert "allowed here: tp, pp, dp" in found["parallel.tpp"]


def test_wrong_type_says_what_was_given() -> None:
    found = problems({"name": "a", "steps": "many", "optimizer": {"lr": -1}})
    assert found["steps"].startswith("is 'many'")
    assert found["optimizer.lr"].startswith("is -1")


@pytest.mark.parametrize("document", [None, [], "name: a", 3])
def test_document_must_be_a_mapping(document: object) -> None:
    assert "must be a mapping" in problems(document)["(document)"]


def test_all_cross_field_problems_come_at_once() -> None:
    found = problems(
        {
            "name": "Not Valid",
            "model": {"layers": 2, "heads": 4, "hidden": 64, "seq_len": 32},
            "parallel": {"tp": 3, "pp": 4, "dp": 2, "micro_batch": 3},
            "data": {"global_batch": 8},
            "resources": {"workers_per_node": 5},
        }
    )
    assert set(found) == {
        "name",
        "model.heads",
        "model.ffn_hidden",
        "model.vocab_size",
        "model.seq_len",
        "parallel.pp",
        "data.global_batch",
        "resources.workers_per_node",
    }
    assert "allowed: 1 to 2" in found["parallel.pp"]
    assert "6 or 12" in found["data.global_batch"]


def test_nodes_must_fit_the_world_size() -> None:
    found = problems({"name": "a", "parallel": {"dp": 1}, "resources": {"nodes": 3}})
    assert "need exactly 1" in found["resources.nodes"]


def test_nodes_decide_the_number_of_replicas_when_the_spec_leaves_it_open() -> None:
    document = {
        "name": "a",
        "parallel": {"tp": 2, "pp": 2},
        "resources": {"nodes": 3, "workers_per_node": 4},
        "data": {"global_batch": 6},
    }
    spec = parse_spec(document)
    assert (spec.parallel.dp, spec.num_nodes) == (3, 3)
    assert parse_spec(json.loads(spec.canonical_json())) == spec


def test_nodes_that_fill_no_number_of_replicas_are_refused() -> None:
    resources = {"nodes": 3, "workers_per_node": 2}
    found = problems({"name": "a", "parallel": {"tp": 2, "pp": 2}, "resources": resources})
    assert "6 ranks" in found["resources.nodes"]
    assert "4 or 8" in found["resources.nodes"]
    found = problems({"name": "a", "resources": {"nodes": 3}})
    assert "is required" in found["resources.workers_per_node"]


@pytest.mark.parametrize("ladder", [[], ["replace", "restart"], ["pause", "pause"], ["shrink"]])
def test_ladder_is_some_of_the_rungs_in_their_order(ladder: list[str]) -> None:
    found = problems({"name": "a", "recovery": {"ladder": ladder}})
    assert found
    assert all(field.startswith("recovery.ladder") for field in found)


def test_heartbeat_limits_must_grow() -> None:
    found = problems({"name": "a", "recovery": {"heartbeat_late_s": 20}})
    assert "longer than recovery.heartbeat_late_s" in found["recovery.heartbeat_lost_s"]


@pytest.mark.parametrize("limits", [(0.25, 0.75, 1.5, 4.0), (0.25, 0.76, 1.6, 1e9)])
def test_heartbeat_limits_at_their_floors_are_accepted(limits: tuple[float, ...]) -> None:
    names = [f"heartbeat_{name}_s" for name in ("period", "late", "lost", "silent")]
    parse_spec({"name": "a", "recovery": dict(zip(names, limits, strict=True))})


def test_default_workers_per_node_is_the_largest_divisor_up_to_eight() -> None:
    parallel = {"tp": 2, "pp": 3, "dp": 2}
    spec = parse_spec({"name": "a", "parallel": parallel, "data": {"global_batch": 8}})
    assert spec.workers_per_node == 6
    assert spec.num_nodes == 2


def test_equal_specs_have_equal_canonical_text_that_parses_back() -> None:
    spec = parse_spec({"name": "a", "steps": 5})
    again = JobSpec.model_validate_json(spec.canonical_json())
    assert again == spec
    assert again.canonical_json() == spec.canonical_json()


@pytest.mark.parametrize("url", ["s3://bucket/checkpoints/gpt-abc12", "/checkpoints/gpt-abc12"])
def test_a_job_may_begin_with_another_ones_checkpoint(url: str) -> None:
    section = {"load": url, "load_step": 40}
    spec = parse_spec({"name": "a", "steps": 50, "checkpoint": section})
    assert (spec.checkpoint.load, spec.checkpoint.load_step) == (url, 40)


def test_a_checkpoint_to_begin_with_has_a_place_and_comes_before_the_end() -> None:
    document: dict[str, Any] = {"name": "a", "steps": 50}
    assert problems({**document, "checkpoint": {"load_step": 40}}) == {
        "checkpoint.load_step": "is 40, which applies only with checkpoint.load, not none; "
        "leave it out"
    }
    assert problems({**document, "checkpoint": {"load": "gpt-abc12"}}) == {
        "checkpoint.load": "is 'gpt-abc12', a relative path; allowed: an absolute path such as "
        "/checkpoints/gpt-abc12, or a URL of file, s3, s3a, gs, gcs, hdfs or webhdfs, such as "
        "s3://bucket/checkpoints/gpt-abc12"
    }
    assert problems({**document, "checkpoint": {"load": "/x/a-1", "load_step": 50}}) == {
        "checkpoint.load_step": "is 50; allowed: 1 to 49, so that steps = 50 leaves some to train"
    }


def test_set_overrides_nested_values() -> None:
    document: dict[str, Any] = {"name": "a"}
    set_value(document, "parallel.tp=2")
    set_value(document, "data.source=/tmp/text")
    assert document == {"name": "a", "parallel": {"tp": 2}, "data": {"source": "/tmp/text"}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[full, none,selective]", ["full", "none", "selective"]),
        ("{level: 1, communication: bf16}", {"level": 1, "communication": "bf16"}),
        ('["1", null]', ["1", None]),
        ("[full", "[full"),
        ("full", "full"),
        ("null", None),
        ("1: 2", "1: 2"),
    ],
)
def test_set_takes_lists_and_sections_as_a_spec_has_them(text: str, value: object) -> None:
    document: dict[str, Any] = {}
    set_value(document, f"field={text}")
    assert document == {"field": value}


@pytest.mark.parametrize("assignment", ["parallel.tp", "=3", "name.x=1", "a..b=1"])
def test_bad_set_is_refused(assignment: str) -> None:
    with pytest.raises(ValueError, match="--set"):
        set_value({"name": "a"}, assignment)


@pytest.mark.parametrize("rolls_back", [{"non_finite_again": "rollback"}, {"spike": "act"}])
def test_a_rollback_needs_checkpoints_that_are_old_enough(rolls_back: dict[str, str]) -> None:
    rollback = {**rolls_back, "rollback_steps": 101}
    assert parse_spec({"name": "a", "detectors": {**rollback, "rollback_steps": 100}})
    assert parse_spec({"name": "a", "detectors": rollback, "checkpoint": {"keep": 4}})
    with pytest.raises(SpecError) as caught:
        parse_spec({"name": "a", "detectors": rollback})
    (problem,) = caught.value.problems
    assert problem.field == "detectors.rollback_steps"
    assert "checkpoint.storage_interval_steps = 50: 1 to 100" in problem.message
