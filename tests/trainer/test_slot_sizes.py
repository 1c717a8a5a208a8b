"""The one formula of a worker's host memory beside what stagers really allocate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.core.names import memory_folder
from checkpoint.core.slots import NUM_SLOTS_WITH_REPLICAS
from checkpoint.memory import held_bytes
from checkpoint.replicas.placing import num_own_slots, placement_of
from checkpoint.sizing import host_memory_bytes, node_host_memory_bytes
from checkpoint.stage.payload import make_table
from checkpoint.stage.slotfile import slot_bytes
from checkpoint.stage.stager import Stager
from outlast.sizing.of_spec import plan_input
from outlast.sizing.slots import host_slot_bytes, saved_bytes
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from tests.trainer.slots import staged_tensors

_QK_NORMS = {"layernorm": ("none", "head"), "rmsnorm": ("none", "head", "all")}
_NORM_PLACES = ("before", "after", "both", "sum")


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    tp, pp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 2, 3), (1, 2, 3, 5)))
    chunks = draw(st.sampled_from((1, 2))) if pp > 1 else 1
    parts = pp * chunks
    heads = draw(st.sampled_from((2, 4, 6)))
    block = draw(st.sampled_from(("serial", "parallel")))
    norm = draw(st.sampled_from(("layernorm", "rmsnorm")))
    tied, biased = draw(st.booleans()), draw(st.booleans())
    activation = draw(st.sampled_from(("gelu", "geglu")))
    model = {
        "layers": draw(st.integers(parts, parts + 3)) if chunks == 1 else parts,
        "heads": heads,
        "kv_heads": draw(st.sampled_from([n for n in (2, heads) if heads % n == 0])),
        "hidden": heads * 2 * draw(st.integers(1, 9)),
        "ffn_hidden": heads * draw(st.integers(2, 20)),
        "vocab_size": 256 + 2 * draw(st.integers(0, 99)),
        "seq_len": 2 * draw(st.integers(4, 9)),
        "tied_embeddings": tied,
        "positions": draw(st.sampled_from(("learned", "rope", "alibi"))),
        "embedding_norm": draw(st.booleans()),
        "activation": activation,
        "head_width": draw(st.sampled_from((None, 2, 8))),
        "qk_norm": draw(st.sampled_from(_QK_NORMS[norm])),
        "qkv_bias": draw(st.sampled_from((None, True, False))),
        "vocab_multiple": draw(st.sampled_from((1, 64))),
        "attention_bias": biased or draw(st.booleans()),
        "mlp_bias": biased or draw(st.booleans()),
        "head_bias": draw(st.booleans()),
        "head_transform": activation != "geglu" and draw(st.booleans()),
        "segments": draw(st.sampled_from((0, 2))),
        "block": block,
        "block_biases": 2 if block == "parallel" and biased else 1,
        "norm": norm,
        "norm_place": "before" if block == "parallel" else draw(st.sampled_from(_NORM_PLACES)),
    }
    if block == "serial" and not model["mlp_bias"] and draw(st.booleans()):
        model["moe"] = {
            "num_experts": draw(st.sampled_from((2, 7))),
            "ffn_hidden": 2 * draw(st.integers(1, 20)),
            "pattern": draw(st.sampled_from((["experts"], ["dense", "experts"]))),
            "shared_ffn_hidden": draw(st.sampled_from((0, 6))),
        }
    data: dict[str, Any] = {"global_batch": dp * parts, "max_bytes": 2**16}
    if model["positions"] != "alibi" and draw(st.booleans()):
        model |= {"attention": "bidirectional", "segments": 2, "sentence_order": True}
        data["masked"] = {"fraction": 0.2, "mask_token": 1, "never": [2, 3]}
        data["sentence_order"] = {"cls_token": 2, "sep_token": 3}
    divided = "moe" in model and model["moe"]["num_experts"] == 2 and dp == 2
    ep = draw(st.sampled_from((1, 2))) if divided else 1
    return parse_spec(
        {
            "name": "job",
            "model": model,
            "data": data,
            "precision": draw(st.sampled_from(("fp32", "bf16", "fp16", "fp64"))),
            "optimizer": {"name": draw(st.sampled_from(("adamw", "lamb")))},
            "parallel": {
                "tp": tp,
                "pp": pp,
                "dp": dp,
                "ep": ep,
                "virtual_stages": chunks,
                "schedule": "interleaved" if chunks > 1 else "1f1b",
                "zero": {"level": draw(st.sampled_from((0, 1, 2, 3)))},
            },
        }
    )


def allocated_bytes(spec: JobSpec) -> Iterator[tuple[int, int]]:
    """Stage of each rank, and size of each of its slots."""
    world = spec.layout.world_size
    for rank in range(world):
        table = make_table(rank, world, staged_tensors(spec, rank))
        size = slot_bytes(table.payload_bytes, table.owned_bytes)
        yield spec.layout.coordinate(rank).pp, size


@settings(max_examples=150, deadline=None)
@given(spec=jobs())
def test_no_slot_is_larger_than_said_nor_much_smaller(spec: JobSpec) -> None:
    facts = plan_input(spec)
    largest: dict[int, int] = {}
    for stage, size in allocated_bytes(spec):
        assert size <= host_slot_bytes(facts, stage)
        largest[stage] = max(largest.get(stage, 0), size)
    for stage, size in largest.items():
        # Of models this small most is what is around the tensors: below 100 KB a layer.
        num_layers = sum(len(part.layers) for part in facts.parts(stage))
        assert host_slot_bytes(facts, stage) < size + 100_000 * (num_layers + 2)
        assert size > saved_bytes(facts, stage)


LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {"parallel": {}},
    "bf16": {"precision": "bf16"},
    "tp2 pp2": {"parallel": {"tp": 2, "pp": 2}},
    "zero 1": {"parallel": {"dp": 2, "zero": {"level": 1}}},
    "zero 3": {"parallel": {"tp": 2, "dp": 4, "zero": {"level": 3}}},
}


@pytest.mark.parametrize("sections", LAYOUTS.values(), ids=LAYOUTS)
def test_of_a_layer_of_a_few_million_parameters_it_is_within_3_percent(
    sections: dict[str, Any],
) -> None:
    """From 3 million parameters a layer and rank on; a 7B model's layer has 200 million."""
    model = {"layers": 2, "hidden": 1024, "heads": 8, "vocab_size": 1024, "seq_len": 64}
    spec = parse_spec({"name": "job", "model": model, **sections})
    facts = plan_input(spec)
    sizes = dict(allocated_bytes(spec))
    for stage, size in sizes.items():
        assert size <= host_slot_bytes(facts, stage) <= 1.03 * size


@pytest.mark.parametrize(
    ("parallel", "replicas"),
    [
        ({}, 0),
        ({"tp": 2, "pp": 2}, 0),
        ({"tp": 2, "pp": 2}, 1),
        ({"dp": 3, "zero": {"level": 2}}, 1),
    ],
    ids=["dense", "tp2 pp2", "tp2 pp2 copied", "zero 2 copied"],
)
def test_what_a_node_was_asked_for_holds_all_that_stagers_make(
    tmp_path: Path, parallel: dict[str, Any], replicas: int
) -> None:
    """In memory, with the tables beside the slots and the last page of each file."""
    spec = parse_spec(
        {
            "name": "job",
            "model": {"layers": 4, "hidden": 66, "heads": 2, "seq_len": 16},
            "data": {"global_batch": 12},
            "parallel": parallel,
            "resources": {"workers_per_node": 1},
            "checkpoint": {"replicas": replicas},
        }
    )
    world, placement = spec.layout.world_size, placement_of(spec)
    num_slots = num_own_slots(placement)
    for rank in range(world):
        folder = tmp_path / memory_folder(rank)
        Stager(
            folder,
            rank=rank,
            attempt=1,
            world_size=world,
            tensors=staged_tensors(spec, rank),
            is_replicated=num_slots == NUM_SLOTS_WITH_REPLICAS,
        ).close()
        own = num_slots * host_slot_bytes(plan_input(spec), spec.layout.coordinate(rank).pp)
        assert held_bytes([folder]) <= own <= host_memory_bytes(spec, [rank])
        assert host_memory_bytes(spec, [rank]) <= node_host_memory_bytes(spec)
