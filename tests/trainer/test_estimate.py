"""`outlast plan`'s numbers beside what the trainer really builds, allocates and sends."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outlast.flops import ModelShape
from outlast.layout import Layout
from outlast.sizing.of_spec import plan_input
from outlast.sizing.parameters import ModelFacts, PlanInput, ValueBytes, ZeroFacts
from outlast.spec.parse import parse_spec
from tests.trainer.jobs import Case, loss_and_gradients
from tests.trainer.jobs_numbers import peak_bytes
from tests.trainer.ranks import RankPool
from trainer.core import schedule as schedules
from trainer.core.activations import block_bytes
from trainer.core.estimate import Plan, plan
from trainer.core.memory import NUM_HOST_SLOTS
from trainer.core.timing import bubble, peak_in_flight


def facts_of(case: Case) -> PlanInput:
    shape = ModelShape(
        layers=case.layers,
        hidden=case.hidden,
        heads=4,
        kv_heads=4,
        mlp_hidden=3 * case.hidden,
        vocab_size=32,
        seq_len=case.seq_len,
    )
    return PlanInput(
        model=ModelFacts(shape=shape, tied_embeddings=case.tied),
        layout=case.layout,
        virtual_stages=case.virtual_stages,
        layer_split=case.layer_split,
        sequence_parallel=case.sequence_parallel and case.layout.tp > 1,
        schedule=case.schedule,
        recompute=("none",) * case.layers,
        micro_batch=case.micro_batch,
        global_batch=case.global_batch,
        sizes=ValueBytes(weight=8, gradient=8, moment=8, gradient_sent=8),
    )


def plan_of(**sections: Any) -> Plan:
    return plan(plan_input(parse_spec({"name": "a", **sections})))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tp=2), Layout(pp=3), Layout(tp=2, pp=2, dp=2)],
    ids=["dense", "tp2", "pp3", "3d"],
)
def test_parameters_are_those_of_the_model(ranks: RankPool, layout: Layout, tied: bool) -> None:
    case = Case(layout=layout, tied=tied)
    estimate = plan(facts_of(case))
    found = ranks.run_once(loss_and_gradients, layout.world_size, case)
    for rank, result in enumerate(found):
        stage = layout.coordinate(rank).pp
        assert estimate.ranks[stage].parameters == result["numbers"]
    assert estimate.parameters == plan(facts_of(replace(case, layout=Layout()))).parameters
    if layout == Layout():
        assert estimate.parameters == found[0]["numbers"]


def zero(level: int, after: str, **parallel: Any) -> dict[str, Any]:
    when = {"reduce_after": after} | ({"reshard_after": after} if level == 3 else {})
    return {"parallel": {"dp": 2, **parallel, "zero": {"level": level, **when}}}


WIDE = {"micro_batch": 4}
LLAMA = {
    "positions": "rope",
    "activation": "swiglu",
    "norm": "rmsnorm",
    "kv_heads": 2,
    "attention_bias": False,
    "mlp_bias": False,
}
# So wide, and with so few tokens, that the optimizer's moment is the one that decides.
LARGE_STATE = {"model": {"hidden": 128, "seq_len": 16}}
MEASURED: dict[str, dict[str, Any]] = {
    "dense": {},
    "larger_batches": {"parallel": WIDE},
    "tp2": {"parallel": {"tp": 2, **WIDE}},
    "tp2_whole_sequence": {"parallel": {"tp": 2, **WIDE, "sequence_parallel": False}},
    "pp2_gpipe": {"parallel": {"pp": 2, "micro_batch": 2, "schedule": "gpipe"}},
    "pp2_untied": {
        "parallel": {"pp": 2, **WIDE},
        "model": {"tied_embeddings": False, "seq_len": 128},
    },
    "pp2_zero_bubble": {"parallel": {"pp": 2, "micro_batch": 2, "schedule": "zb-h1"}},
    "pp2_folded": {
        "parallel": {"pp": 2, "micro_batch": 2, "schedule": "zb-v", "virtual_stages": 2}
    },
    "tp2_pp2_folded": {
        "parallel": {"tp": 2, "pp": 2, "schedule": "zb-v", "virtual_stages": 2},
        "model": {**LLAMA, "seq_len": 128},
    },
    "tp2_pp2_zero_bubble": {
        "parallel": {"tp": 2, "pp": 2, "schedule": "zb-h1"},
        "model": {**LLAMA, "seq_len": 128},
    },
    "pp2_interleaved": {"parallel": {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"}},
    "pp2_interleaved_odd": {
        "parallel": {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"},
        "data": {"global_batch": 5, "max_bytes": 2**16},
    },
    "3d": {"parallel": {"tp": 2, "pp": 2, "dp": 2, "micro_batch": 2}},
    "zero_1": {"parallel": {"dp": 2, **WIDE, "zero": {"level": 1}}},
    "zero_2": zero(2, "micro_batch"),
    "zero_3": zero(3, "micro_batch"),
    "zero_3_once": zero(3, "step"),
    "zero_3_pp2": zero(3, "step", pp=2),
    "recompute_full": {"parallel": {**WIDE, "recompute": "full"}},
    "recompute_offload": {"parallel": {**WIDE, "recompute": "offload"}},
    "recompute_offload_pp2": {
        "parallel": {"pp": 2, "micro_batch": 2, "recompute": "offload"},
        "model": {"layers": 8, "seq_len": 128},
    },
    "recompute_selective": {"parallel": {**WIDE, "recompute": "selective"}},
    "cp2": {"parallel": {"cp": 2, **WIDE}},
    "cp2_tp2": {"parallel": {"cp": 2, "tp": 2, **WIDE}},
    "cp2_pp2": {"parallel": {"cp": 2, "pp": 2, **WIDE}},
    # Long enough that gradients on their way to the other ranks weigh little.
    "cp2_full": {
        "parallel": {"cp": 2, **WIDE, "recompute": "full"},
        "model": {"seq_len": 256},
    },
    "cp2_selective": {"parallel": {"cp": 2, **WIDE, "recompute": "selective"}},
    "cp2_ring": {
        "parallel": {"cp": 2, **WIDE, "context": "ring"},
        "model": {**LLAMA, "seq_len": 256},
    },
    "cp2_llama": {"parallel": {"cp": 2, **WIDE}, "model": LLAMA},
    "cp4_for_two_kv_heads": {
        "parallel": {"cp": 4, **WIDE},
        "model": {**LLAMA, "window": 16, "seq_len": 256},
    },
    "cp2_dp2_zero_3": zero(3, "micro_batch", cp=2),
    "parallel_block": {"parallel": {"tp": 2, **WIDE}, "model": {"block": "parallel"}},
    "llama": {"parallel": WIDE, "model": {**LLAMA, "tied_embeddings": False}},
    "tp4_for_two_kv_heads": {"parallel": {"tp": 4, **WIDE}, "model": LLAMA},
    "tp2_for_one_kv_head": {
        "parallel": {"tp": 2, **WIDE},
        "model": {"block": "parallel", "kv_heads": 1, "positions": "rope"},
    },
    "qwen3": {"parallel": WIDE, "model": {**LLAMA, "qk_norm": "head", "head_width": 32}},
    "olmo2": {
        "parallel": {"tp": 2, **WIDE},
        "model": {**LLAMA, "qk_norm": "all", "norm_place": "after"},
    },
    "gemma": {
        "parallel": {"tp": 2, **WIDE},
        "model": {
            **LLAMA,
            "activation": "geglu_tanh",
            "norm_weight": "one_plus",
            "embedding_scale": 8.0,
            "vocab_multiple": 64,
        },
    },
    "gemma2": {
        "parallel": WIDE,
        "model": {
            **LLAMA,
            "norm_place": "both",
            "attention_softcap": 5.0,
            "logit_softcap": 3.0,
            "window": 16,
            "window_pattern": ["local", "global"],
        },
    },
    "some_layers_rotate": {
        "parallel": WIDE,
        "model": {**LLAMA, "rope_pattern": ["none", "none", "rope"]},
    },
    "experts": {"parallel": WIDE, "model": {**LLAMA, "moe": {"num_experts": 4}}},
    "experts_plain": {
        "parallel": {"tp": 2, **WIDE, "sequence_parallel": False, "recompute": "full"},
        "model": {
            "mlp_bias": False,
            "moe": {"num_experts": 4, "ffn_hidden": 96, "router_z_loss_coef": 0.1},
        },
    },
    "experts_and_shared": {
        "parallel": {"tp": 2, "pp": 2, **WIDE},
        "model": {
            **LLAMA,
            "moe": {
                "num_experts": 8,
                "ffn_hidden": 64,
                "shared_ffn_hidden": 128,
                "shared_gate": True,
                "pattern": ["dense", "experts"],
                "router_aux_loss_coef": 0.1,
            },
        },
    },
    "experts_bf16": {
        "precision": "bf16",
        "parallel": WIDE,
        "model": {**LLAMA, "moe": {"num_experts": 4, "shared_ffn_hidden": 64}},
    },
    "experts_ep2": {
        "parallel": {"dp": 4, "ep": 2, "micro_batch": 2, "zero": {"level": 1}},
        "model": {**LLAMA, "moe": {"num_experts": 4}},
    },
    "experts_ep2_zero_3": {
        "parallel": {"dp": 2, "ep": 2, "micro_batch": 4, "zero": {"level": 3}},
        "model": {**LLAMA, "layers": 8, "moe": {"num_experts": 4}},
    },
    "experts_zero_3": {
        **zero(3, "micro_batch", **WIDE),
        "model": {**LLAMA, "layers": 8, "moe": {"num_experts": 2, "ffn_hidden": 64}},
    },
    "norms_after": {"parallel": WIDE, "model": {**LLAMA, "norm_place": "after"}},
    "norms_of_sums": {"parallel": {"tp": 2, **WIDE}, "model": {"norm_place": "sum"}},
    "window": {"parallel": WIDE, "model": {"window": 16, "seq_len": 128}},
    "megascale": {
        "parallel": WIDE,
        "model": {**LLAMA, "norm": "layernorm", "block": "parallel", "window": 16},
    },
    "bloom": {
        "parallel": {"tp": 2, **WIDE},
        "model": {"positions": "alibi", "embedding_norm": True, "seq_len": 128},
    },
    "dropout": {"parallel": WIDE, "model": {"dropout": 0.1, "attention_dropout": 0.1}},
    "bf16": {"parallel": WIDE, "precision": "bf16"},
    "bf16_zero_3_alone": {"precision": "bf16", "parallel": {"zero": {"level": 3}}},
    "lamb": {**LARGE_STATE, "optimizer": {"name": "lamb"}},
    "lamb_zero_2": {**LARGE_STATE, **zero(2, "micro_batch"), "optimizer": {"name": "lamb"}},
    "pp2_uneven": {"parallel": {"pp": 2, "micro_batch": 2, "layer_split": [1, 3]}},
    "pp2_interleaved_uneven": {
        "parallel": {
            "pp": 2,
            "virtual_stages": 2,
            "schedule": "interleaved",
            "layer_split": [5, 1, 1, 1],
        },
        "model": {"layers": 8, "seq_len": 128},
    },
    "bf16_zero_3": {**zero(3, "micro_batch"), "precision": "bf16"},
    "large_vocabulary": {"model": {"vocab_size": 4096}},
}


@pytest.mark.parametrize("sections", MEASURED.values(), ids=list(MEASURED))
def test_memory_is_within_a_tenth_of_what_is_allocated(
    ranks: RankPool, tmp_path: Path, sections: dict[str, Any]
) -> None:
    model = {"layers": 4, "hidden": 64, "heads": 4, "seq_len": 64, "vocab_size": 512}
    document = {
        "name": "measured",
        "steps": 2,
        "data": {"global_batch": 8, "max_bytes": 2**16},
        "eval": {"interval_steps": None},
        **sections,
        "model": {**model, **sections.get("model", {})},
    }
    spec = parse_spec(document)
    measured = ranks.run(peak_bytes, spec.layout.world_size, document, tmp_path)
    estimate = plan(plan_input(spec))
    for rank, allocated in enumerate(measured):
        stage = spec.layout.coordinate(rank).pp
        needed = estimate.ranks[stage]
        # A CPU's tensors are all in host memory.
        both = needed.device_bytes + needed.host_activations_bytes
        assert both == pytest.approx(allocated, rel=0.1), rank


# Bytes of state for each parameter of a rank: weights, gradients, optimizer. ZeRO (arXiv
# 1910.02054), figure 1, with fp32 sums of gradients where it has 2 bytes, and at level 3
# without a shard of the 16-bit weights: they are made from the fp32 ones when gathered.
@pytest.mark.parametrize(
    ("level", "per_parameter"),
    [(0, (2, 4, 12)), (1, (2, 4, 12 / 4)), (2, (2, 4 / 4, 12 / 4)), (3, (0, 4 / 4, 12 / 4))],
)
def test_zero_divides_state_by_the_replicas(
    level: int, per_parameter: tuple[float, float, float]
) -> None:
    parallel = {"dp": 4, "zero": {"level": level}}
    (rank,) = plan_of(precision="bf16", parallel=parallel).ranks
    parts = (rank.weights_bytes, rank.gradients_bytes, rank.optimizer_bytes)
    assert [part / rank.parameters for part in parts] == pytest.approx(per_parameter, rel=1e-4)
    share = 1 if level == 0 else 4
    assert rank.host_slots_bytes == pytest.approx(
        NUM_HOST_SLOTS * 12 * rank.parameters / share, rel=1e-4
    )


def test_once_a_step_zero_keeps_what_it_would_send_each_time() -> None:
    layout = {"dp": 2, "pp": 2, "micro_batch": 1}
    each = {"level": 3, "reshard_after": "micro_batch", "reduce_after": "micro_batch"}
    # Deep enough that the buckets in use are not all there are.
    deep = {"layers": 16}
    rare = plan_of(model=deep, parallel={**layout, "zero": {"level": 3}})
    often = plan_of(model=deep, parallel={**layout, "zero": each})
    assert often.communication.dp_bytes > rare.communication.dp_bytes
    assert often.ranks[0].device_bytes < rare.ranks[0].device_bytes


def test_recompute_keeps_less_and_computes_more() -> None:
    model = {"layers": 4, "hidden": 64, "seq_len": 64}
    plans = [
        plan_of(model=model, parallel={"recompute": mode})
        for mode in ("none", "selective", ["full", "full", "none", "none"], "full")
    ]
    kept = [found.ranks[0].activations_bytes for found in plans]
    again = [found.recomputed_flops_per_token for found in plans]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4
    assert again[0] == 0 < again[1] < again[2] < again[3]


def test_one_replica_has_nothing_to_share() -> None:
    for level in (1, 2, 3):
        alone = plan_of(precision="bf16", parallel={"zero": {"level": level}})
        assert alone == plan_of(precision="bf16")


def test_lamb_holds_the_directions_of_all_buckets_at_once() -> None:
    model = {"hidden": 512, "seq_len": 8}
    adamw, lamb = (
        plan_of(model=model, optimizer={"name": name}).ranks[0] for name in ("adamw", "lamb")
    )
    # In fp32, on top of all that is kept but the activations, which are gone by then.
    assert lamb.working_bytes == 4 * lamb.parameters - lamb.activations_bytes
    assert lamb.working_bytes > adamw.working_bytes


def test_the_peak_of_a_rank_is_of_the_chunks_that_it_holds_then() -> None:
    """Stage 0 of two with two chunks each never holds more than 5 micro-batches of chunks."""
    even, front, back = (
        plan(
            facts_of(
                Case(
                    layout=Layout(pp=2),
                    layers=8,
                    global_batch=16,
                    schedule="interleaved",
                    virtual_stages=2,
                    layer_split=split,
                )
            )
        )
        .ranks[0]
        .activations_bytes
        for split in ((2, 2, 2, 2), (3, 2, 1, 2), (1, 2, 3, 2))
    )
    layer = block_bytes(facts_of(Case(layout=Layout(pp=2))), 0)
    # Most of the first chunk: 4 and 1 of the second, 13 layers, where an even split has 10.
    assert front - even == 3 * layer
    # Least of it: 3 and 2, 9 layers, and one micro-batch less of what the embedding keeps.
    assert even - back == pytest.approx(layer, rel=0.01)


@pytest.mark.parametrize("micro_batches", [4, 6, 7, 8, 13])
def test_theory_holds_with_virtual_stages_too(micro_batches: int) -> None:
    case = Case(layout=Layout(pp=4), layers=12, global_batch=2 * micro_batches)
    facts = replace(facts_of(case), schedule="interleaved", virtual_stages=3)
    timing = schedules.check(schedules.build("interleaved", 4, micro_batches, num_chunks=3))
    assert tuple(peak_in_flight(facts, stage) for stage in range(4)) == timing.peak_in_flight


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_layers_of_chunks_are_listed_in_the_order_of_the_model(schedule: str) -> None:
    facts = facts_of(Case(layout=Layout(pp=2), layers=7))
    given = replace(facts, schedule=schedule, virtual_stages=2, layer_split=(1, 1, 4, 1))
    assert plan(given).chunk_layers == (1, 1, 4, 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 8), (4, 2)])
def test_theory_is_what_the_built_schedule_costs(
    name: str, stages: int, micro_batches: int
) -> None:
    case = Case(layout=Layout(pp=stages), schedule=name, global_batch=2 * micro_batches)
    facts = facts_of(case)
    timing = schedules.check(schedules.build(name, stages, micro_batches))
    assert bubble(facts) == pytest.approx(timing.bubble)
    held = tuple(peak_in_flight(facts, stage) for stage in range(stages))
    assert held == timing.peak_in_flight


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
@pytest.mark.parametrize(
    ("stages", "micro_batches"),
    [(2, 4), (2, 5), (4, 2), (4, 4), (4, 5), (4, 6), (4, 7), (3, 4), (3, 9)],
)
def test_theory_of_several_chunks_needs_no_multiples(
    name: str, stages: int, micro_batches: int
) -> None:
    layout = Layout(pp=stages)
    case = Case(layout=layout, layers=2 * stages, global_batch=2 * micro_batches)
    facts = replace(facts_of(case), schedule=name, virtual_stages=2)
    timing = schedules.check(schedules.build(name, stages, micro_batches, num_chunks=2))
    assert bubble(facts) == pytest.approx(timing.bubble)
    held = tuple(peak_in_flight(facts, stage) for stage in range(stages))
    assert held == timing.peak_in_flight


def test_virtual_stages_make_the_bubble_smaller() -> None:
    """MegaScale's 12,288 GPUs: 8 stages, 6 chunks, 32 micro-batches: 21.9 % to 3.6 %."""
    case = Case(layout=Layout(pp=8), layers=48, global_batch=64)
    plain = facts_of(case)
    virtual = replace(plain, schedule="interleaved", virtual_stages=6)

    def over_ideal(facts: PlanInput) -> float:
        return bubble(facts) / (1 - bubble(facts))

    assert over_ideal(plain) == pytest.approx(7 / 32)
    assert over_ideal(virtual) == pytest.approx(7 / (6 * 32))
    # Megatron-LM: activations grow by 1 + (p - 1)/(p v) over those of 1F1B.
    assert peak_in_flight(virtual, 0) / 6 == pytest.approx(8 * (1 + 7 / 48), rel=0.02)


def test_a_dimension_of_one_sends_nothing() -> None:
    sent = plan(facts_of(Case(layout=Layout()))).communication
    assert sent.total_bytes == 0
    wide = plan(facts_of(Case(layout=Layout(tp=2, pp=2, dp=2)))).communication
    assert min(wide.tp_bytes, wide.pp_bytes, wide.dp_bytes, wide.embedding_bytes) > 0
    untied = plan(facts_of(Case(layout=Layout(pp=2), tied=False))).communication
    assert (untied.tp_bytes, untied.dp_bytes, untied.embedding_bytes) == (0, 0, 0)


def test_traffic_follows_its_formulas() -> None:
    case = Case(layout=Layout(tp=2, pp=2, dp=2))
    facts = facts_of(case)
    stream, micro_batches, width = 8 * 8 * 2 * 16, 2, 8
    sent = plan(facts).communication
    # Two layers of four messages forward and six backward, the head's two, and three numbers
    # of each of its 16 tokens.
    ends = 2 * stream // 2 + 3 * 16 * 8
    # Once: the sums of what both tensor ranks hold of two blocks, and of the last norm.
    first, last = 2 * 6 * 16 + 8 * 16, 2 * 6 * 16 + 2 * 16
    layers = 2 * 10 * stream // 2
    assert sent.tp_bytes == micro_batches * (layers + ends) + last * 8
    assert first > last, "the first stage sums more, but sends no losses"
    assert sent.pp_bytes == micro_batches * stream // 2
    parameters = max(rank.parameters for rank in plan(facts).ranks)
    assert sent.dp_bytes == 2 * parameters * width // 2
    joined = replace(facts.model, parallel_block=True, norms_per_block=1)
    parallel_block = plan(replace(facts, model=joined)).communication
    assert parallel_block.tp_bytes == micro_batches * (layers // 2 + ends) + (last - 2 * 3 * 16) * 8
    twice = plan(replace(facts, zero=ZeroFacts(level=3))).communication
    # Reduced once and gathered once a step: as many bytes as an all-reduce.
    assert twice.dp_bytes == sent.dp_bytes


def test_planning_needs_no_torch() -> None:
    code = "import sys, trainer.planning, trainer.core.estimate, trainer.core.projection; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
