"""Specs that cannot work are refused, each with what would."""

from __future__ import annotations

import re
from typing import Any

import pytest

from outlast.problems import SpecError
from outlast.spec.parse import parse_spec

MODEL = {"layers": 8, "hidden": 64, "heads": 8, "seq_len": 32}

EXPERTS = {"moe": {"num_experts": 6}, "mlp_bias": False}


def problems(**sections: Any) -> dict[str, str]:
    model = {**MODEL, **sections.pop("model", {})}
    with pytest.raises(SpecError) as caught:
        parse_spec({"name": "a", "model": model, **sections})
    return {problem.field: problem.message for problem in caught.value.problems}


MODEL_PROBLEMS: list[tuple[dict[str, Any], str, str]] = [
    ({"hidden": 60}, "model.hidden", "56 or 64"),
    ({"kv_heads": 3}, "model.heads", r"model.kv_heads in \{1, 2, 4, 8\}"),
    ({"block": "parallel", "ffn_hidden": 100}, "model.ffn_hidden", "96 or 104"),
    ({"positions": "rope", "rope_fraction": 0.4}, "model.rope_fraction", "0.25 or 0.5"),
    ({"positions": "rope", "heads": 64}, "model.rope_fraction", "fewer model.heads"),
    ({"window_pattern": ["local", "global"]}, "model.window_pattern", "only with model.window"),
    ({"window": 4, "window_pattern": ["global"]}, "model.window_pattern", "at least one local"),
    ({"block_norms": 2}, "model.block_norms", "only with model.block = parallel"),
    ({"attention": "bidirectional"}, "model.attention", r"data\.masked\.fraction above 0"),
    (
        {"head_transform": True, "activation": "swiglu"},
        "model.head_transform",
        "only with a model.activation without a gate, not swiglu",
    ),
    ({"rope_theta": 5e5}, "model.rope_theta", "500000.0, .* model.positions = rope, not learned"),
    ({"rope_fraction": 0.5}, "model.rope_fraction", "only with model.positions = rope"),
    (
        {"rope_pairs": "neighbours", "positions": "none"},
        "model.rope_pairs",
        "only with model.positions = rope, not none",
    ),
    (
        {"norm": "rmsnorm", "norm_bias": False},
        "model.norm_bias",
        "only with model.norm = layernorm",
    ),
]


@pytest.mark.parametrize(("model", "field", "message"), MODEL_PROBLEMS)
def test_what_is_wrong_with_a_model_is_said(
    model: dict[str, Any], field: str, message: str
) -> None:
    found = problems(model=model)
    assert list(found) == [field]
    assert re.search(message, found[field])


LAYOUT_PROBLEMS: list[tuple[dict[str, Any], str, str]] = [
    ({"parallel": {"tp": 3}}, "model.heads", r"parallel.tp in \{1, 2, 4, 8\}"),
    (
        {"parallel": {"tp": 4}, "model": {"heads": 12, "kv_heads": 6, "hidden": 96}},
        "model.kv_heads",
        "near it: 4 or 8, or .* or multiples of 6",
    ),
    (
        {"parallel": {"tp": 8}, "model": {"hidden": 8, "kv_heads": 1}},
        "parallel.tp",
        r"do not divide the 2 rows of its key and value; allowed: 1, 2",
    ),
    ({"parallel": {"pp": 9}}, "parallel.pp", "allowed: 1 to 8"),
    (
        {"parallel": {"pp": 2, "virtual_stages": 5, "schedule": "interleaved"}},
        "parallel.virtual_stages",
        "allowed: 1 to 4",
    ),
    (
        {"parallel": {"pp": 2, "virtual_stages": 2}},
        "parallel.virtual_stages",
        "only with parallel.schedule = interleaved",
    ),
    (
        {"parallel": {"pp": 2, "schedule": "interleaved"}},
        "parallel.schedule",
        "virtual_stages in 2 to 4",
    ),
    (
        {"parallel": {"virtual_stages": 2, "schedule": "interleaved"}},
        "parallel.schedule",
        "needs parallel.pp > 1",
    ),
    (
        {"parallel": {"pp": 2, "virtual_stages": 2, "schedule": "zb-h1"}},
        "parallel.virtual_stages",
        "only with parallel.schedule = interleaved or zb-v, not zb-h1",
    ),
    (
        {"parallel": {"pp": 2, "schedule": "zb-v", "virtual_stages": 2}, "model": {"layers": 3}},
        "parallel.pp",
        "is 2; with parallel.schedule = zb-v .* more than model.layers = 3; allowed: another",
    ),
    (
        {"parallel": {"pp": 2, "schedule": "zb-v"}},
        "parallel.virtual_stages",
        "is 1 with parallel.schedule = zb-v; allowed: 2",
    ),
    (
        {"parallel": {"schedule": "zb-v", "virtual_stages": 2}},
        "parallel.schedule",
        "is zb-v, which needs parallel.pp > 1; allowed: 1f1b or gpipe",
    ),
    (
        {"parallel": {"schedule": "zb-h1"}},
        "parallel.schedule",
        "is zb-h1, which needs parallel.pp > 1; allowed: 1f1b or gpipe",
    ),
    (
        {"parallel": {"pp": 2, "schedule": "zb-h1", "extra_warmup": 1}},
        "parallel.extra_warmup",
        "only with parallel.schedule = 1f1b, not zb-h1",
    ),
    (
        {
            "parallel": {
                "pp": 2,
                "dp": 2,
                "schedule": "zb-h1",
                "zero": {"level": 2, "reduce_after": "micro_batch"},
            }
        },
        "parallel.zero.reduce_after",
        "saves no memory with parallel.schedule = zb-h1: .* allowed: step, or the schedules 1f1b",
    ),
    (
        {"parallel": {"extra_warmup": 1}},
        "parallel.extra_warmup",
        "is 1, which applies only with parallel.pp > 1, not 1; leave it out",
    ),
    (
        {"parallel": {"zero": {"communication": "bf16"}}},
        "parallel.zero.communication",
        "is bf16, which applies only with parallel.dp > 1",
    ),
    (
        {"parallel": {"pp": 2, "schedule": "gpipe", "extra_warmup": 1}},
        "parallel.extra_warmup",
        "only with parallel.schedule = 1f1b",
    ),
    ({"parallel": {"pp": 2, "layer_split": [5, 2]}}, "parallel.layer_split", r"such as \[4, 4\]"),
    ({"parallel": {"pp": 2, "layer_split": [8, 0]}}, "parallel.layer_split", "1 or more"),
    ({"parallel": {"pp": 2, "layer_split": [8]}}, "parallel.layer_split", "= 2 numbers"),
    ({"parallel": {"recompute": ["full"]}}, "parallel.recompute", "model.layers = 8"),
    ({"parallel": {"cp": 3}}, "model.heads", r"parallel.cp in \{1, 2, 4, 8\}"),
    (
        {"parallel": {"cp": 4, "tp": 4}},
        "model.heads",
        r"is 8, which parallel.tp x parallel.cp = 16 does not divide; .*\{1, 2, 4, 8\}",
    ),
    (
        {"parallel": {"cp": 4}, "model": {"heads": 12, "kv_heads": 6, "hidden": 96}},
        "parallel.cp",
        "is 4; tp x cp = 4 neither divides model.kv_heads = 6 nor is a multiple of it; "
        "allowed: 1, 2, 3, 6, 12",
    ),
    (
        {"parallel": {"cp": 4, "tp": 2}, "model": {"seq_len": 36}},
        "model.seq_len",
        "is 36, which parallel.tp x parallel.cp = 8 does not divide; .*near it: 32 or 40",
    ),
    (
        {"parallel": {"cp": 4, "tp": 2, "sequence_parallel": False}, "model": {"seq_len": 34}},
        "model.seq_len",
        "is 34, which parallel.cp = 4 does not divide",
    ),
    (
        {"parallel": {"cp": 2, "dp": 2, "ep": 3}, "model": EXPERTS},
        "parallel.dp x parallel.cp",
        "is 4, which parallel.ep = 3 does not divide",
    ),
    (
        {"parallel": {"cp": 2, "dp": 1}, "resources": {"nodes": 3, "workers_per_node": 1}},
        "resources.nodes",
        "tp x cp x pp x dp = 2 ranks at 1 per node need exactly 2",
    ),
    (
        {"parallel": {"dp": 2, "ep": 2}},
        "parallel.ep",
        "is 2, which applies only with model.moe.num_experts > 0",
    ),
    (
        {"parallel": {"dp": 4, "ep": 3}, "model": EXPERTS},
        "parallel.dp",
        r"is 4, which parallel.ep = 3 does not divide; .*parallel.ep in \{1, 2, 4\}",
    ),
    (
        {"parallel": {"dp": 4, "ep": 4}, "model": EXPERTS},
        "model.moe.num_experts",
        r"is 6, which parallel.ep = 4 does not divide; .*parallel.ep in \{1, 2, 3, 6\}",
    ),
    (
        {"parallel": {"tp": 2}, "model": {**EXPERTS, "moe": {"num_experts": 6, "ffn_hidden": 9}}},
        "model.moe.ffn_hidden",
        "is 9, which parallel.tp = 2 does not divide",
    ),
    (
        {"parallel": {"zero": {"level": 2, "reshard_after": "step"}}},
        "parallel.zero.reshard_after",
        "only with parallel.zero.level = 3",
    ),
    (
        {"parallel": {"zero": {"level": 1, "reduce_after": "step"}}},
        "parallel.zero.reduce_after",
        "level 2 or 3",
    ),
]


@pytest.mark.parametrize(("document", "field", "message"), LAYOUT_PROBLEMS)
def test_what_is_wrong_with_a_layout_is_said(
    document: dict[str, Any], field: str, message: str
) -> None:
    assert re.search(message, problems(**document)[field])


TRAINING_PROBLEMS: list[tuple[dict[str, Any], str, str]] = [
    ({"loss_scale": {"initial": 4}}, "loss_scale.initial", "only with precision = fp16"),
    (
        {"precision": "fp16", "loss_scale": {"initial": 4, "minimum": 8}},
        "loss_scale.initial",
        "8 or more",
    ),
    (
        {"optimizer": {"schedule": {"decay_steps": 5}}},
        "optimizer.schedule.decay_steps",
        "only with optimizer.schedule.name = wsd",
    ),
    (
        {"optimizer": {"schedule": {"warmup_steps": 101}}},
        "optimizer.schedule.warmup_steps",
        "is 101, longer than the job: .* allowed: 0 to steps = 100",
    ),
    (
        {"steps": 20, "optimizer": {"schedule": {"name": "wsd", "decay_steps": 15}}},
        "optimizer.schedule.decay_steps",
        "allowed: 1 to 10",
    ),
    (
        {"optimizer": {"schedule": {"name": "constant", "min_ratio": 0.5}}},
        "optimizer.schedule.min_ratio",
        "is 0.5, which applies only with a schedule that decays",
    ),
    (
        {"optimizer": {"lamb": {"phi_max": None}}},
        "optimizer.lamb.phi_max",
        "only with optimizer.name = lamb",
    ),
    (
        {"optimizer": {"name": "lamb", "lamb": {"phi_min": 20}}},
        "optimizer.lamb.phi_max",
        "more than optimizer.lamb.phi_min = 20",
    ),
]


@pytest.mark.parametrize(("document", "field", "message"), TRAINING_PROBLEMS)
def test_settings_that_nothing_would_read_are_refused(
    document: dict[str, Any], field: str, message: str
) -> None:
    found = problems(**document)
    assert list(found) == [field]
    assert re.search(message, found[field])


GOOD: list[dict[str, Any]] = [
    {"parallel": {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"}},
    {
        "parallel": {"pp": 4, "virtual_stages": 2, "schedule": "interleaved"},
        "data": {"global_batch": 6},
    },
    {"parallel": {"pp": 2, "schedule": "zb-h1"}},
    {"parallel": {"pp": 2, "extra_warmup": 1}},
    {"parallel": {"dp": 2, "zero": {"communication": "bf16"}}},
    {"steps": 1000, "optimizer": {"schedule": {"name": "constant", "warmup_steps": 1000}}},
    # The default warm-up may be longer than a job of a few steps.
    {"steps": 5},
    # As floats, 0.14 and 0.58 of 100 are not whole; six decimals must do for a third.
    {"model": {"positions": "rope", "heads": 1, "hidden": 100, "rope_fraction": 0.14}},
    {"model": {"positions": "rope", "heads": 1, "hidden": 100, "rope_fraction": 0.58}},
    {"model": {"positions": "rope", "heads": 1, "hidden": 96, "rope_fraction": 0.333333}},
    {"parallel": {"pp": 2, "layer_split": [5, 3], "recompute": ["none"] * 4 + ["full"] * 4}},
    {"parallel": {"dp": 2, "zero": {"level": 3, "reshard_after": "step", "reduce_after": "step"}}},
    {"precision": "fp16", "loss_scale": {"growth_interval": 10}},
    {"optimizer": {"name": "lamb", "lamb": {"phi_max": None}, "schedule": {"name": "wsd"}}},
    {"model": {"positions": "rope", "kv_heads": 2, "activation": "swiglu", "block": "parallel"}},
    {"model": {"window": 8, "window_pattern": ["local", "global"], "block": "parallel"}},
]


@pytest.mark.parametrize("document", GOOD)
def test_what_works_is_taken_and_comes_back_from_its_own_text(document: dict[str, Any]) -> None:
    model = {**MODEL, **document.get("model", {})}
    spec = parse_spec({"name": "a", **document, "model": model})
    assert parse_spec(spec.model_dump(mode="json")) == spec


def nearest(**sections: Any) -> list[str]:
    message = problems(**sections)["parallel"]
    assert message.startswith("layouts that would work, nearest first: ")
    return message.partition(": ")[2].split("; ")


def works(words: str, **sections: Any) -> bool:
    """Whether the layout in `words` is one that the rules take."""
    changes = dict(part.rsplit(" ", 1) for part in words.split(", ") if part != "no layer_split")
    parallel = {**sections.pop("parallel"), **changes}
    parallel.pop("layer_split", None)
    model = {**MODEL, **sections.pop("model", {})}
    parse_spec({"name": "a", "model": model, "parallel": parallel, **sections})
    return True


@pytest.mark.parametrize(
    "document",
    [
        document
        for document, field, _ in LAYOUT_PROBLEMS
        if "zero" not in field and "extra" not in field and "ep" not in document["parallel"]
    ],
)
def test_layouts_that_are_offered_work(document: dict[str, Any]) -> None:
    offered = nearest(**document) if "recompute" not in document["parallel"] else []
    assert all(works(words, **document) for words in offered)


@pytest.mark.parametrize(
    ("document", "field", "message"),
    [
        (
            {"parallel": {"cp": 3, "context": "ring"}, "model": {"seq_len": 64}},
            "model.seq_len",
            "is 64, which 2 x parallel.cp = 6 does not divide; .*near it: 60 or 66",
        ),
        (
            {"parallel": {"context": "ring"}},
            "parallel.context",
            "is ring, which applies only with parallel.cp > 1, not 1; leave it out",
        ),
        (
            {"parallel": {"cp": 2, "context": "ring"}, "model": {"positions": "alibi"}},
            "parallel.context",
            "is ring, which model.positions = alibi does not work with; allowed: all_to_all",
        ),
    ],
)
def test_what_a_ring_cannot_do_is_refused(
    document: dict[str, Any], field: str, message: str
) -> None:
    assert re.search(message, problems(**document)[field])


def test_nodes_that_replicas_of_several_parts_do_not_fill_are_refused() -> None:
    found = problems(parallel={"cp": 2}, resources={"nodes": 3, "workers_per_node": 1})
    assert "which replicas of tp x cp x pp = 2 ranks do not fill" in found["resources.nodes"]
    nodes = {"nodes": 4, "workers_per_node": 1}
    spec = parse_spec({"name": "a", "parallel": {"cp": 2}, "resources": nodes})
    assert (spec.parallel.dp, spec.layout.dp, spec.num_micro_batches) == (2, 4, 4)


def test_a_layout_of_the_same_size_comes_first() -> None:
    batch = {"global_batch": 12}
    offered = nearest(parallel={"tp": 3, "pp": 2, "dp": 2}, data=batch)
    assert offered[0] == "tp 2, pp 2, dp 3"
    assert len(offered) == 3


def test_where_no_layout_helps_none_is_offered() -> None:
    found = problems(parallel={"tp": 2, "zero": {"level": 1, "reshard_after": "step"}})
    assert list(found) == ["parallel.zero.reshard_after"]


ELASTIC_PROBLEMS: list[tuple[dict[str, Any], str]] = [
    (
        {
            "parallel": {"dp": 4},
            "resources": {"workers_per_node": 1},
            "recovery": {"elastic": {"min_dp": 3}},
        },
        "allowed: at most 2 (sizes near it: 1, 2)",
    ),
    ({"recovery": {"elastic": {"min_dp": 1}}}, "allowed: null"),
    (
        {
            "parallel": {"dp": 4},
            "resources": {"workers_per_node": 4},
            "recovery": {"elastic": {"min_dp": 1}},
        },
        "4 workers per node; allowed: null",
    ),
]


@pytest.mark.parametrize(("sections", "message"), ELASTIC_PROBLEMS)
def test_elastic_job_without_a_smaller_size_is_refused(
    sections: dict[str, Any], message: str
) -> None:
    found = problems(**sections)
    assert list(found) == ["recovery.elastic.min_dp"]
    assert message in found["recovery.elastic.min_dp"]


def test_layout_that_does_not_work_says_nothing_of_smaller_ones() -> None:
    found = problems(parallel={"dp": 3}, recovery={"elastic": {"min_dp": 2}})
    assert "recovery.elastic.min_dp" not in found


def test_copies_of_more_ranks_than_can_be_placed_are_refused() -> None:
    found = problems(
        parallel={"dp": 2**18}, data={"global_batch": 2**18}, checkpoint={"replicas": 1}
    )
    allowed = "is 1, in a job of 262144 ranks; allowed: 0, or at most 131072 ranks"
    assert found == {"checkpoint.replicas": allowed}


@pytest.mark.parametrize("field", ["hidden", "heads"])
def test_a_size_beyond_its_limit_is_one_problem(field: str) -> None:
    """What would divide a number that is not allowed is no help."""
    found = problems(model={field: 2**63 - 1})
    assert set(found) == {f"model.{field}"}
    assert found[f"model.{field}"].startswith(f"is {2**63 - 1}; allowed: at most")


def test_values_beyond_the_limit_of_a_field_are_not_offered() -> None:
    found = problems(parallel={"tp": 2**63 - 1})["model.heads"]
    assert found.endswith("does not divide; allowed: parallel.tp in {1, 2, 4, 8}")
