"""The plan's bytes and messages per step beside what the trainer's groups count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outlast.blackbox import Group
from outlast.sizing.of_spec import plan_input
from outlast.sizing.parameters import PlanInput
from outlast.spec.parse import parse_spec
from tests.trainer.jobs_numbers import sent
from tests.trainer.ranks import RankPool
from trainer.core.estimate import plan
from trainer.core.message_counts import (
    context_messages,
    end_messages,
    expert_messages,
    layer_messages,
)

# The plan leaves out the few numbers that all ranks agree on at the end of a step, the padding
# of ZeRO's shards, and that gloo sends a small sum whole to every one of several peers.
TOLERANCE = 0.02

UNTIED = {"tied_embeddings": False}
EACH = {"reduce_after": "micro_batch", "reshard_after": "micro_batch"}
ONCE = {"reduce_after": "step", "reshard_after": "step"}
LLAMA = {"positions": "rope", "activation": "swiglu", "norm": "rmsnorm", "kv_heads": 2}
EXPERTS = {
    **LLAMA,
    "mlp_bias": False,
    "moe": {
        "num_experts": 4,
        "pattern": ["dense", "experts"],
        "shared_ffn_hidden": 32,
        "shared_gate": True,
        "router_aux_loss_coef": 0.1,
        "router_aux_loss_over": "model",
    },
}


def case(model: dict[str, Any] | None = None, **parallel: Any) -> dict[str, Any]:
    return {"parallel": parallel, "model": model or {}}


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2_sp": case(tp=2),
    "tp2": case(tp=2, sequence_parallel=False),
    "tp2_sp_overlapped": case(tp=2, tp_chunks=4),
    "tp2_sp_recomputed": case(tp=2, recompute="full"),
    "tp2_sp_parallel_block": case({"block": "parallel"}, tp=2),
    "tp2_parallel_block": case({"block": "parallel"}, tp=2, sequence_parallel=False),
    "tp2_sp_two_norms": case({"block": "parallel", "block_norms": 2}, tp=2),
    "tp2_two_norms": case(
        {"block": "parallel", "block_norms": 2}, tp=2, sequence_parallel=False, recompute="full"
    ),
    "tp2_sp_llama": case({**LLAMA, **UNTIED}, tp=2),
    "tp4_sp": case(tp=4),
    "tp4_sp_for_two_kv_heads": case({**LLAMA, **UNTIED}, tp=4),
    "tp2_for_one_kv_head": case(
        {"kv_heads": 1, "block": "parallel"}, tp=2, sequence_parallel=False, recompute="full"
    ),
    "tp2_sp_olmo2": case({**LLAMA, "qk_norm": "all"}, tp=2, recompute="selective"),
    "tp2_olmo2_for_one_kv_head": case(
        {**LLAMA, "qk_norm": "all", "kv_heads": 1}, tp=2, sequence_parallel=False
    ),
    "tp2_olmo2_full": case({**LLAMA, "qk_norm": "all"}, tp=2, recompute="full"),
    "tp2_qwen3": case({**LLAMA, "qk_norm": "head"}, tp=2, sequence_parallel=False),
    "tp2_sp_experts": case(EXPERTS, tp=2),
    "tp2_experts": case(EXPERTS, tp=2, sequence_parallel=False, recompute="full"),
    "tp2_pp2_sp_experts": case(EXPERTS, tp=2, pp=2, recompute="full"),
    "ep2_dp4_zero_1": case(EXPERTS, dp=4, ep=2, micro_batch=1, zero={"level": 1}),
    "ep2_tp2": case(EXPERTS, tp=2, dp=2, ep=2, recompute="full"),
    "cp2": case(cp=2),
    "cp4_for_two_kv_heads_selective": case(LLAMA, cp=4, recompute="selective", zero={"level": 1}),
    "cp2_ring_pp2": case(LLAMA, cp=2, pp=2, context="ring"),
    "cp4_ring_full": case(LLAMA, cp=4, context="ring", recompute="full", zero={"level": 1}),
    "cp2_tp2_sp": case(LLAMA, cp=2, tp=2, recompute="full"),
    "cp2_tp2_pp2": case(cp=2, tp=2, pp=2, sequence_parallel=False),
    "cp2_dp2_zero_1": case({"block": "parallel"}, cp=2, dp=2, zero={"level": 1}),
    "pp2": case(pp=2),
    "pp2_untied": case(UNTIED, pp=2),
    "pp2_uneven": case(pp=2, layer_split=[3, 1]),
    "pp2_interleaved": case(pp=2, virtual_stages=2, schedule="interleaved"),
    "tp2_pp2_sp": case(tp=2, pp=2),
    "tp2_pp2_sp_zero_bubble": case(tp=2, pp=2, schedule="zb-h1"),
    "tp2_pp2_zero_bubble_experts": case(EXPERTS, tp=2, pp=2, schedule="zb-h1"),
    "pp2_folded": case(pp=2, virtual_stages=2, schedule="zb-v"),
    "tp2_pp2_folded": case(tp=2, pp=2, virtual_stages=2, schedule="zb-v", sequence_parallel=False),
    "tp2_pp2_sp_folded_untied": case(UNTIED, tp=2, pp=2, virtual_stages=2, schedule="zb-v"),
    "pp2_dp2_folded_zero_3_each": case(
        pp=2,
        dp=2,
        virtual_stages=2,
        schedule="zb-v",
        zero={"level": 3, "reshard_after": "micro_batch"},
    ),
    "pp2_dp2_folded_zero_3": case(pp=2, dp=2, virtual_stages=2, schedule="zb-v", zero={"level": 3}),
    "tp2_pp2": case(tp=2, pp=2, sequence_parallel=False),
    "tp2_pp2_interleaved": case(
        tp=2, pp=2, virtual_stages=2, schedule="interleaved", sequence_parallel=False
    ),
    "zero_0": case(dp=2),
    "zero_0_bf16_sent": case(dp=2, zero={"communication": "bf16"}),
    "zero_1": case(dp=2, zero={"level": 1}),
    "zero_2_once": case(dp=2, zero={"level": 2, "reduce_after": "step"}),
    "zero_2_each": case(dp=2, zero={"level": 2, "reduce_after": "micro_batch"}),
    "zero_3_once": case(dp=2, zero={"level": 3, **ONCE}),
    "zero_3_each": case(dp=2, zero={"level": 3, **EACH}),
    "zero_3_each_embedding_norm": case(
        {"embedding_norm": True, "positions": "alibi"}, dp=2, zero={"level": 3, **EACH}
    ),
    "pp2_dp2": case(pp=2, dp=2),
    "pp2_dp2_zero_1": case(pp=2, dp=2, zero={"level": 1}),
    "pp2_dp2_zero_3_each": case(pp=2, dp=2, zero={"level": 3, **EACH}),
    "tp2_dp2_sp_zero_1": case(tp=2, dp=2, zero={"level": 1}),
    "tp2_pp2_dp2_sp_zero_2": case(tp=2, pp=2, dp=2, zero={"level": 2}),
}


@pytest.mark.parametrize("sections", LAYOUTS.values(), ids=list(LAYOUTS))
def test_each_group_sends_what_the_plan_says(
    ranks: RankPool, tmp_path: Path, sections: dict[str, Any]
) -> None:
    model = {"layers": 4, "hidden": 64, "heads": 4, "seq_len": 32, "vocab_size": 256}
    document = {
        "name": "counted",
        "steps": 3,
        "data": {"global_batch": 8, "max_bytes": 2**16},
        "eval": {"interval_steps": None},
        "model": {**model, **sections["model"]},
        "parallel": {"micro_batch": 2, **sections["parallel"]},
    }
    spec = parse_spec(document)
    found = ranks.run(sent, spec.layout.world_size, document, tmp_path)
    busiest = {group: max(rank[group][0] for rank in found) for group in found[0]}
    facts = plan_input(spec)
    for rank, groups in enumerate(found):
        check_waits(facts, spec.layout.coordinate(rank).pp, groups)
    planned = plan(facts).communication
    # Experts that fewer replicas hold are summed among these.
    busiest[Group.DP] += busiest.get(Group.EXPERT_DP, 0)
    # The router decides, and it is only planned to be even.
    assert busiest.get(Group.EP, 0) == pytest.approx(planned.ep_bytes, rel=0.25)
    assert busiest.get(Group.CP, 0) == planned.cp_bytes
    for group, expected in (
        (Group.TP, planned.tp_bytes),
        (Group.PP, planned.pp_bytes),
        (Group.DP, planned.dp_bytes),
        (Group.EMBEDDING, planned.embedding_bytes),
    ):
        assert busiest[group] == pytest.approx(expected, rel=TOLERANCE), group


def check_waits(facts: PlanInput, stage: int, groups: dict[Group, tuple[int, int]]) -> None:
    """A rank waits for as many messages as a projection has it wait for."""
    waits = {group: number for group, (_, number) in groups.items()}
    each = facts.num_micro_batches
    layers = each * (layer_messages(facts, stage) + end_messages(facts, stage))
    # Gradients of what all tensor ranks hold are summed once a step, and the norm of all.
    once = 2 if facts.sequence_parallel else 1 if layers else 0
    assert waits[Group.TP] == layers + once
    assert waits.get(Group.CP, 0) == each * sum(context_messages(facts, stage))
    assert waits.get(Group.EP, 0) == each * expert_messages(facts, stage)
