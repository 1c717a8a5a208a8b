"""`outlast plan`'s numbers beside what the trainer really builds and sends."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from outlast.layout import Layout
from tests.trainer.jobs import Case, loss_and_gradients
from tests.trainer.ranks import RankPool
from trainer.core.estimate import NUM_HOST_SLOTS, PlanInput, flops_per_token, plan


def facts_of(case: Case) -> PlanInput:
    return PlanInput(
        layers=case.layers,
        hidden=case.hidden,
        heads=4,
        mlp_hidden=3 * case.hidden,
        vocab_size=32,
        seq_len=case.seq_len,
        tied_embeddings=case.tied,
        tp=case.layout.tp,
        pp=case.layout.pp,
        dp=case.layout.dp,
        sequence_parallel=case.sequence_parallel,
        schedule=case.schedule,
        micro_batch=case.micro_batch,
        global_batch=case.global_batch,
        bytes_per_value=8,
    )


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


def test_memory_by_part_of_a_known_job() -> None:
    estimate = plan(facts_of(Case(layout=Layout(tp=2, pp=2, dp=2))))
    first, last = estimate.ranks
    assert first.weights_bytes == first.gradients_bytes == 8 * first.parameters
    assert first.optimizer_bytes == 2 * first.weights_bytes
    assert first.host_slots_bytes == NUM_HOST_SLOTS * 3 * first.weights_bytes
    # 1F1B holds two micro-batches on the first stage and one on the last.
    assert estimate.peak_in_flight == (2, 1)
    tokens, d = 8 * 2, 16
    block = 4 * tokens * d // 2 + (5 * tokens * d + 2 * tokens * 3 * d) // 2
    received = 2 * tokens * d // 2
    assert first.activations_bytes == 8 * (2 * 2 * block + received)
    output = 2 * tokens * d // 2 + tokens * 32 // 2
    assert last.activations_bytes == 8 * (2 * block + output + received)
    assert first.device_bytes == (
        first.weights_bytes
        + first.gradients_bytes
        + first.optimizer_bytes
        + first.activations_bytes
    )


def test_flops_are_six_per_weight_and_half_of_the_attention() -> None:
    facts = facts_of(Case(layout=Layout()))
    d, layers = 16, 4
    weights = layers * (4 * d * d + 2 * d * 3 * d) + 32 * d
    assert flops_per_token(facts) == 6 * weights + 6 * layers * d * facts.seq_len


def test_a_dimension_of_one_sends_nothing() -> None:
    sent = plan(facts_of(Case(layout=Layout()))).communication
    assert sent.total_bytes == 0
    wide = plan(facts_of(Case(layout=Layout(tp=2, pp=2, dp=2)))).communication
    assert min(wide.tp_bytes, wide.pp_bytes, wide.dp_bytes, wide.embedding_bytes) > 0
    untied = plan(facts_of(Case(layout=Layout(pp=2), tied=False))).communication
    assert (untied.tp_bytes, untied.dp_bytes, untied.embedding_bytes) == (0, 0, 0)


def test_planning_needs_no_torch() -> None:
    code = "import sys, trainer.core.estimate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
