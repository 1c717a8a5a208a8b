"""The search for a layout: exact for the projection, within the rules, and beside the papers."""

from __future__ import annotations

import time
from collections.abc import Collection
from itertools import product
from typing import Any

import pytest

from outlast.problems import SpecError
from outlast.rules.check import check
from outlast.sizing.of_spec import plan_input
from outlast.spec import JobSpec
from outlast.spec.models import ZeroSpec
from outlast.spec.parse import read_spec
from trainer.core.advice import Takeaway, advice, differences, terms
from trainer.core.cost import training
from trainer.core.memory import rank_memory
from trainer.core.projection import Machine, least_step_s, project
from trainer.core.search import device_bytes, search
from trainer.layouts import fastest_layouts

A100 = Machine(
    peak_flops_per_s=312e12,
    kernel_share=0.7,
    peer_bytes_per_s=300e9,
    link_bytes_per_s=25e9,
    ranks_per_node=8,
    latency_s=20e-6,
)
USABLE = 0.9 * 80e9
SMALL = {"layers": 8, "hidden": 512, "heads": 8, "seq_len": 512, "vocab_size": 4096}


def spec_of(nodes: int, **sections: Any) -> JobSpec:
    resources = {"nodes": nodes, "workers_per_node": 8}
    document = {"name": "a", "precision": "bf16", "resources": resources, **sections}
    document["parallel"] = {"dp": 1, **document.get("parallel", {})}
    spec, problems = read_spec(document)
    assert spec is not None
    assert not problems
    return spec


def small(nodes: int = 2, **sections: Any) -> JobSpec:
    return spec_of(nodes, **{"model": SMALL, "data": {"global_batch": 64}, **sections})


def all_candidates(spec: JobSpec) -> list[JobSpec]:
    """A few meshes, each used in every way that a search could choose among."""
    found = []
    for tp, pp in ((1, 1), (2, 2), (4, 2)):
        for micro_batch, recompute, level in product(
            (1, 2, 4), ("none", "selective", "full"), (0, 1)
        ):
            degrees = {"tp": tp, "pp": pp, "dp": 16 // tp // pp, "tp_chunks": 8}
            use = {"micro_batch": micro_batch, "recompute": recompute}
            zero = ZeroSpec.model_validate({"level": level})
            parallel = spec.parallel.model_copy(update={**degrees, **use, "zero": zero})
            found.append(spec.model_copy(update={"parallel": parallel}))
    return found


def test_a_search_finds_what_projecting_everything_finds() -> None:
    candidates = [plan_input(each, on_gpu=True) for each in all_candidates(small())]
    limit = sorted(device_bytes(facts) for facts in candidates)[len(candidates) // 2]
    searched = search(candidates, A100, limit)
    for layout in {facts.layout for facts in candidates}:
        fits = [f for f in candidates if f.layout == layout and device_bytes(f) <= limit]
        best = min((project(facts, A100).step_s for facts in fits), default=None)
        found = [one for one in searched.found if one.facts.layout == layout]
        assert [one.step.step_s for one in found] == pytest.approx(
            [] if best is None else [best], rel=0.01
        )
        assert all(one.device_bytes <= limit for one in found)
    assert searched.num_projected < len(candidates)


def test_no_step_is_shorter_than_its_bound() -> None:
    """Nothing that is left out by the bound could have been the fastest."""
    for spec in all_candidates(small()):
        facts = plan_input(spec, on_gpu=True)
        assert least_step_s(facts, A100) <= project(facts, A100).step_s * (1 + 1e-9)


def test_every_layout_that_is_found_keeps_the_rules_and_fits() -> None:
    found = fastest_layouts(small(3, data={"global_batch": 72}), A100, USABLE)
    assert len(found.specs) > 3
    for spec, one in zip(found.specs, found.searched.found, strict=True):
        assert check(spec) == []
        assert spec.layout.world_size == 24
        assert one.facts == plan_input(spec, on_gpu=True)
    steps = [one.step.step_s for one in found.searched.found]
    assert steps == pytest.approx(sorted(steps), rel=0.01)


def test_less_memory_takes_recompute_or_zero_before_it_takes_no_layout() -> None:
    roomy = fastest_layouts(small(), A100, USABLE).searched.found[0]
    tight = fastest_layouts(small(), A100, 0.7 * roomy.device_bytes).searched.found[0]
    assert tight.device_bytes <= 0.7 * roomy.device_bytes
    assert tight.step.step_s >= roomy.step.step_s * 0.99
    none = fastest_layouts(small(), A100, 1e6)
    assert none.specs == ()
    assert 1e6 < none.searched.least_device_bytes <= tight.device_bytes


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"tp": 2}, ["tp"]),
        ({"micro_batch": 2, "recompute": "full"}, ["micro_batch", "recompute"]),
        ({"zero": {"level": 2}, "tp_chunks": 1}, ["zero", "tp_chunks"]),
        ({"schedule": "gpipe"}, ["schedule"]),
        ({"pp": 4, "virtual_stages": 2}, ["pp", "virtual_stages"]),
    ],
)
def test_held_fields_stay_as_they_are(given: dict[str, Any], held: Collection[str]) -> None:
    spec = small(parallel=given)
    found = fastest_layouts(spec, A100, USABLE, held=held)
    assert found.specs
    for each in found.specs:
        for name in held:
            assert getattr(each.parallel, name) == getattr(spec.parallel, name)


@pytest.mark.parametrize(
    ("sections", "held", "message"),
    [
        ({"data": {"global_batch": 7}, "model": {**SMALL, "layers": 1}}, [], "data.global_batch"),
        ({"parallel": {"tp": 3}}, ["tp"], "parallel.tp"),
        ({"parallel": {"pp": 16}}, ["pp"], "pp at most model.layers = 8"),
        ({"parallel": {"tp": 16}, "model": {**SMALL, "heads": 8}}, ["tp"], "model.heads: is 8"),
    ],
)
def test_where_there_is_no_layout_the_field_is_named(
    sections: dict[str, Any], held: Collection[str], message: str
) -> None:
    with pytest.raises(SpecError, match="allowed") as caught:
        fastest_layouts(small(**sections), A100, USABLE, held=held)
    assert message in str(caught.value)


def test_the_terms_of_a_step_add_up_and_say_where_two_differ() -> None:
    found = fastest_layouts(small(), A100, USABLE).searched.found
    best, other = found[0].step, found[-1].step
    for step in (best, other):
        assert sum(terms(step).values()) == pytest.approx(step.step_s)
    parts = differences(best, other)
    assert sum(seconds for _, seconds in parts) == pytest.approx(other.step_s - best.step_s)
    assert abs(parts[0][1]) == max(abs(seconds) for _, seconds in parts)


def test_takeaways_that_do_not_hold_come_with_the_layout_that_follows_them() -> None:
    found = fastest_layouts(small(), A100, USABLE)
    ranked = found.searched.found
    one = next(each for each in ranked if each.facts.layout.tp * each.facts.layout.pp == 1)
    wide = next(e for e in ranked if e.facts.layout.tp == 2 and e.facts.layout.pp == 2)
    by_name = {a.takeaway: a for a in advice((wide, one), found.by_micro_batch, 2)}
    assert by_name[Takeaway.TENSOR_IN_NODES].follows
    assert not by_name[Takeaway.LEAST_MODEL_PARALLEL].follows
    assert by_name[Takeaway.LEAST_MODEL_PARALLEL].other == one
    assert all(each.follows for each in advice((one,), (), 8))
    sizes = [each.facts.micro_batch for each in found.by_micro_batch]
    assert len(set(sizes)) == len(sizes)
    assert by_name[Takeaway.MICRO_BATCH].other == found.by_micro_batch[1]


def test_training_takes_what_the_papers_formula_says() -> None:
    """GPT-3 of 175 B, 300 B tokens, 1,024 A100 at 140 TFLOP/s: 34 days (PTD-P, section 5.1)."""
    model = {"layers": 96, "hidden": 12288, "heads": 96, "vocab_size": 51200, "seq_len": 2048}
    parallel = {"tp": 8, "pp": 8, "dp": 16, "recompute": "full"}
    spec = spec_of(128, model=model, data={"global_batch": 1536}, parallel=parallel)
    step = project(plan_input(spec), A100)
    # As fast as the paper's.
    scale = step.hfu_full * 312 / 140
    slow = Machine(
        peak_flops_per_s=312e12 / scale,
        kernel_share=A100.kernel_share,
        peer_bytes_per_s=A100.peer_bytes_per_s / scale,
        link_bytes_per_s=A100.link_bytes_per_s / scale,
        ranks_per_node=8,
    )
    steps = round(300e9 / (1536 * 2048))
    facts = plan_input(spec)
    found = training(facts, project(facts, slow), slow, steps=steps, price_per_hour=2.0)
    assert found.by_formula_s / 86400 == pytest.approx(34, abs=0.7)
    # Attention and the vocabulary come on top of the formula's products.
    assert found.by_formula_s < found.projected_s < 1.06 * found.by_formula_s
    assert found.device_hours == pytest.approx(found.projected_s * 1024 / 3600)
    assert found.price_per_million_tokens * found.tokens / 1e6 == pytest.approx(found.price)


def test_of_experts_the_formula_counts_those_of_a_token() -> None:
    """Mixtral 8x7B has 46.7 B parameters, of which a token uses 12.9 B."""
    spec = spec_of(2, model={"preset": "mixtral-8x7b"}, data={"global_batch": 16})
    spec = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"dp": 16})})
    facts = plan_input(spec)
    step = project(facts, A100)
    found = training(facts, step, A100, steps=10, price_per_hour=0.0)
    flops = 6 * 12.9e9 * found.tokens
    assert found.by_formula_s == pytest.approx(flops / (16 * step.hfu_full * 312e12), rel=0.01)
    assert found.price == 0


LONG = {"layers": 8, "hidden": 4096, "heads": 32, "seq_len": 65536, "vocab_size": 32000}


def long(**sections: Any) -> JobSpec:
    return small(model=LONG, data={"global_batch": 1}, **sections)


def test_long_sequences_are_divided_where_that_is_fastest() -> None:
    """Of one sequence a step replicas are no use, and a pipeline only idles."""
    found = fastest_layouts(long(), A100, USABLE)
    best = found.specs[0]
    assert best.parallel.cp > 1
    assert check(best) == []
    degrees = {(each.parallel.tp, each.parallel.cp, each.parallel.pp) for each in found.specs}
    assert len(degrees) == len(found.specs)
    # Heads are swapped where they divide; rings are projected faster than they are.
    assert best.parallel.context == "all_to_all"
    held = fastest_layouts(long(parallel={"context": "ring"}), A100, USABLE, held=["context"])
    assert held.specs[0].parallel.context == "ring"
    few = long()
    few = few.model_copy(update={"model": few.model.model_copy(update={"heads": 4, "kv_heads": 4})})
    ring = [each.parallel for each in fastest_layouts(few, A100, USABLE).specs]
    assert {each.context for each in ring if each.tp * each.cp > 4 and each.cp > 1} == {"ring"}


def test_short_sequences_are_not_divided_unless_that_is_held() -> None:
    assert {each.parallel.cp for each in fastest_layouts(small(), A100, USABLE).specs} == {1}
    held = fastest_layouts(small(parallel={"cp": 2}), A100, USABLE, held=["cp"])
    assert {each.parallel.cp for each in held.specs} == {2}


def test_zero_bubble_is_taken_where_the_bubble_is_large() -> None:
    """As many micro-batches as stages, and no virtual stages to make the bubble smaller."""
    given = {"pp": 4, "tp": 1, "micro_batch": 1, "virtual_stages": 1}
    spec = small(1, data={"global_batch": 8}, parallel=given)
    found = fastest_layouts(spec, A100, USABLE, held=[*given])
    best = found.searched.found[0]
    assert found.specs[0].parallel.schedule == "zb-h1"
    plain = fastest_layouts(
        spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"schedule": "1f1b"})}),
        A100,
        USABLE,
        held=[*given, "schedule"],
    )
    assert best.step.bubble_s < plain.searched.found[0].step.bubble_s


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)],
)
def test_a_layout_fits_where_each_of_its_ranks_does(
    schedule: str, chunks: int, recompute: str
) -> None:
    parallel = {
        "pp": 4,
        "dp": 2,
        "micro_batch": 2,
        "schedule": schedule,
        "virtual_stages": chunks,
        "recompute": recompute,
    }
    model = {**SMALL, "layers": 16, "tied_embeddings": False}
    facts = plan_input(spec_of(1, model=model, data={"global_batch": 64}, parallel=parallel))
    needed = max(rank_memory(facts, stage).device_bytes for stage in range(4))
    # Receive buffers differ between stages that are alike otherwise.
    assert device_bytes(facts) == pytest.approx(needed, rel=0.02)


def test_layouts_of_a_thousand_nodes_are_searched_in_seconds() -> None:
    """Processor time: other processes of the machine are not the search's."""
    model = {"preset": "megascale-175b"}
    spec = spec_of(1024, model=model, data={"global_batch": 6144})
    began = time.process_time()
    found = fastest_layouts(spec, A100, USABLE)
    assert time.process_time() - began < 10.0
    assert found.searched.num_candidates > 5_000
    assert found.specs[0].layout.world_size == 8192
