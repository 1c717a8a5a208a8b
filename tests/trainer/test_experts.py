"""Mixture of experts: every layout trains as one rank does, and goes on from any other's state.

`test_oracles` and `test_hf_training` hold Mixtral, Qwen2-MoE and Qwen3-MoE to `transformers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from outlast.layout import Layout
from outlast.spec.parse import parse_spec
from outlast.worker_contract import WorkerExitCode
from tests.trainer.jobs import mesh_of, train
from tests.trainer.ranks import RankContext, RankPool
from tests.trainer.resuming import make_text, spec_of, steps_of, train_and_upload
from trainer.model.grouped import Slots, gathered, grouped_linear, spread
from trainer.model.router import Router, layer_terms, router_loss
from trainer.parallel.weight_gradients import WeightGradients
from trainer.worker.configure import gpt_config

MODEL: dict[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "seq_len": 16,
    "activation": "swiglu",
    "mlp_bias": False,
}
MOE = {"num_experts": 4, "ffn_hidden": 24, "router_aux_loss_coef": 0.05, "router_z_loss_coef": 0.01}
SHARED = {**MOE, "shared_ffn_hidden": 20, "norm_topk_prob": False}
OVER_MODEL = {**MOE, "router_aux_loss_over": "model", "experts_per_token": 3}
STEPS = 4
LAYOUTS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "tp2": (SHARED, "adamw", {"tp": 2}),
    "whole_sequence": (
        {**SHARED, "shared_gate": True},
        "adamw",
        {"tp": 2, "sequence_parallel": False, "recompute": "full"},
    ),
    "pp2": ({**MOE, "pattern": ["dense", "experts"]}, "lamb", {"tp": 2, "pp": 2}),
    "losses_over_stages": (
        OVER_MODEL,
        "adamw",
        {"tp": 2, "pp": 2, "sequence_parallel": False},
    ),
    "zero_3": (OVER_MODEL, "lamb", {"dp": 2, "zero": {"level": 3}, "recompute": "full"}),
    "ep2": (SHARED, "lamb", {"dp": 4, "ep": 2, "recompute": "full"}),
    "ep4_zero_2": (MOE, "adamw", {"dp": 4, "ep": 4, "zero": {"level": 2}}),
    "ep2_zero_3": (
        {**OVER_MODEL, "pattern": ["dense", "experts"]},
        "lamb",
        {"pp": 2, "dp": 2, "ep": 2, "zero": {"level": 3}, "recompute": "full"},
    ),
    "zero_2": (MOE, "adamw", {"tp": 2, "dp": 2, "zero": {"level": 2}}),
}


def job(
    folder: Path, moe: dict[str, Any], optimizer: str, parallel: dict[str, Any], **checkpoint: Any
) -> dict[str, Any]:
    return spec_of(
        folder,
        steps=STEPS,
        precision="fp64",
        model={**MODEL, "moe": moe},
        parallel=parallel,
        optimizer={"name": optimizer, "lr": 0.01},
        eval={"interval_steps": None},
        checkpoint={"storage_interval_steps": 2, **checkpoint},
    )


def run(ranks: RankPool, folder: Path, spec: dict[str, Any]) -> list[float]:
    """Loss and gradient norm of each step."""
    folder.mkdir()
    world_size = parse_spec(spec).layout.world_size
    results = ranks.run(train, world_size, folder, spec, 1)
    assert {result["code"] for result in results} == {WorkerExitCode.DONE}
    steps = steps_of(folder, 1, world_size - 1)
    return [number for each in steps for number in (each.loss, each.grad_norm)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_rank(ranks: RankPool, tmp_path: Path, name: str) -> None:
    moe, optimizer, parallel = LAYOUTS[name]
    make_text(tmp_path)
    dense = run(ranks, tmp_path / "dense", job(tmp_path, moe, optimizer, {}))
    split = run(ranks, tmp_path / "split", job(tmp_path, moe, optimizer, parallel))
    assert split == pytest.approx(dense, rel=1e-9)

    # What they save has the same tensors: one rank goes on from them.
    half = tmp_path / "half"
    half.mkdir()
    train_and_upload(ranks, half, job(tmp_path, moe, optimizer, parallel), attempt=1, stop_after=2)
    load = str(half / "store" / "job-1")
    rest = run(ranks, tmp_path / "rest", job(tmp_path, moe, optimizer, {}, load=load))
    assert rest == pytest.approx(dense[4:], rel=1e-9)


def test_slots_give_what_a_loop_over_tokens_does() -> None:
    torch.manual_seed(0)
    x = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 6, 6, dtype=torch.float64, requires_grad=True)
    given = torch.rand(11, 2, dtype=torch.float64, requires_grad=True)
    # Nobody goes to expert 3, and only one token to expert 0.
    chosen = torch.tensor([[0, 4], *[[4, 1], [2, 4]] * 5])
    slots = Slots.of(chosen, 5)
    assert slots.counts == [1, 5, 5, 0, 11]

    def grouped(x: torch.Tensor, weight: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return gathered(
            grouped_linear(spread(x, slots), weight, slots, WeightGradients()), given, slots
        )

    expected = torch.stack(
        [
            sum(
                scale * (weight[expert] @ token)
                for expert, scale in zip(experts, scales, strict=True)
            )
            for token, experts, scales in zip(x, chosen, given, strict=True)
        ]
    )
    torch.testing.assert_close(grouped(x, weight, given), expected)
    assert torch.autograd.gradcheck(grouped, (x, weight, given))


def test_the_losses_of_a_router_are_as_defined() -> None:
    """Switch Transformer (arXiv 2101.03961), eq. 4-6, and ST-MoE (2202.08906), eq. 5."""
    moe = {**MOE, "experts_per_token": 1}
    document = {"name": "a", "model": {**MODEL, "moe": moe}, "precision": "fp64"}
    config = gpt_config(parse_spec(document))
    mesh = mesh_of(RankContext(rank=0, world_size=1, port=0, listen_fd=-1), Layout())
    assert config.moe is not None
    router = Router(config, mesh, config.moe)
    torch.manual_seed(0)
    x = torch.randn(16, 2, 32, dtype=torch.float64)
    torch.nn.init.normal_(router.weight)
    routing = router(x)
    slots = Slots.of(routing.chosen_SBK.flatten(0, 1), 4)
    found = router_loss(config, router.tp, layer_terms(config.moe, routing, slots.counts_E))

    probabilities = torch.softmax(x.flatten(0, 1) @ router.weight.t(), dim=-1)
    dispatched = F.one_hot(probabilities.argmax(dim=-1), 4).double()
    balance = 4 * (dispatched.mean(dim=0) * probabilities.mean(dim=0)).sum()
    square = torch.logsumexp(x.flatten(0, 1) @ router.weight.t(), dim=-1).square().mean()
    torch.testing.assert_close(found, 0.05 * balance + 0.01 * square)
