"""The optimizer beside torch's, the schedule at its corners, clipping by the global norm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outlast.layout import Layout
from outlast.sizing.partition import ModelPart
from tests.trainer.jobs import Case, loss_and_gradients, mesh_of
from tests.trainer.ranks import RankContext, RankPool
from trainer.model.config import GptConfig
from trainer.model.gpt import GptChunk
from trainer.model.parameters import FlatParameters
from trainer.optim.adam import AdamWConfig
from trainer.optim.adamw import FlatAdamW
from trainer.optim.clip import clip_gradients
from trainer.optim.schedule import LearningRate


def _flat(dtype: torch.dtype = torch.float64) -> tuple[GptChunk, FlatParameters]:
    mesh = mesh_of(RankContext(rank=0, world_size=1, port=0, listen_fd=-1), Layout())
    config = GptConfig(
        layers=2,
        hidden=8,
        heads=2,
        mlp_hidden=16,
        vocab_size=32,
        seq_len=8,
        tied_embeddings=True,
        norm_eps=1e-5,
        init_std=0.1,
        sequence_parallel=True,
        dtype=dtype,
    )
    chunk = GptChunk(config, mesh, ModelPart(layers=range(2), is_first=True, is_last=True))
    flat = FlatParameters([chunk], tp_size=1)
    flat.initialise(11)
    return chunk, flat


def test_flat_adamw_equals_torchs_with_no_decay_on_norms_and_biases() -> None:
    chunk, flat = _flat()
    ours = FlatAdamW(flat, AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1))
    copies = {name: p.detach().clone().requires_grad_() for name, p in chunk.named_parameters()}
    theirs = torch.optim.AdamW(
        [
            {"params": [p for p in copies.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in copies.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
    )
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 8):
        learning_rate = 0.01 / step
        flat.grads.normal_(generator=generator)
        for name, copy in copies.items():
            copy.grad = flat.view(flat.grads, name).clone()
        for group in theirs.param_groups:
            group["lr"] = learning_rate
        theirs.step()
        ours.step(step, learning_rate)
    for name, parameter in chunk.named_parameters():
        torch.testing.assert_close(parameter.detach(), copies[name].detach(), rtol=1e-13, atol=0)


def test_flat_slices_cover_what_they_say() -> None:
    _, flat = _flat()
    decayed = sum(b.decayed.stop - b.decayed.start for b in flat.buckets)
    assert decayed == sum(
        flat.view(flat.values, n).numel() for n, f in flat.facts.items() if f.decays
    )
    assert not any(bucket.tied for bucket in flat.buckets)
    assert flat.values.numel() == sum(bucket.size for bucket in flat.buckets)


def test_initial_values_depend_on_seed_and_name_only() -> None:
    _, one = _flat()
    _, two = _flat(torch.float32)
    assert torch.equal(one.values.float(), two.values)
    two.initialise(12)
    assert not torch.equal(one.values.float(), two.values)


def test_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    cosine = LearningRate(name="cosine", peak=1.0, warmup_steps=4, min_ratio=0.1, steps=24)
    assert [cosine.at(step) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert cosine.at(14) == pytest.approx(0.55)
    assert cosine.at(24) == pytest.approx(0.1)
    assert cosine.at(1000) == pytest.approx(0.1)
    constant = replace(cosine, name="constant")
    assert constant.at(24) == 1.0
    assert replace(constant, warmup_steps=0).at(1) == 1.0
    linear = replace(cosine, name="linear")
    assert [linear.at(step) for step in (4, 9, 14, 24)] == pytest.approx([1.0, 0.775, 0.55, 0.1])


def test_warm_up_stable_decay_holds_the_peak_until_its_last_steps() -> None:
    wsd = LearningRate(
        name="wsd", peak=1.0, warmup_steps=4, min_ratio=0.0, steps=24, decay_steps=10
    )
    assert [wsd.at(step) for step in (2, 4, 14, 19, 24)] == [0.5, 1.0, 1.0, 0.5, 0.0]
    # A decay longer than what is left after the warm-up begins right there.
    assert replace(wsd, decay_steps=40).at(14) == 0.5


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, pp=2, dp=2)])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_global_norm_counts_every_tensor_once(
    ranks: RankPool, layout: Layout, sequence_parallel: bool
) -> None:
    """Tied copies and replicated tensors included: the norm of the full gradient."""
    case = Case(layout=layout, sequence_parallel=sequence_parallel)
    found = ranks.run_once(loss_and_gradients, layout.world_size, case)
    full: dict[tuple[str, tuple[int, ...]], float] = {}
    for result in found:
        for name, (_, offsets, gradient) in result["gradients"].items():
            full[name, offsets] = float((gradient**2).sum())
    assert {result["norm"] for result in found} == {found[0]["norm"]}
    assert found[0]["norm"] == pytest.approx(sum(full.values()) ** 0.5, rel=1e-12)


def test_clipping_scales_to_the_limit_and_leaves_smaller_gradients_alone() -> None:
    _, flat = _flat()
    flat.grads.fill_(1.0)
    norm = float(flat.grads.norm())
    clip_gradients(flat, norm, None)
    clip_gradients(flat, norm, norm * 2)
    assert float(flat.grads.norm()) == norm
    clip_gradients(flat, norm, 0.5)
    assert float(flat.grads.norm()) == pytest.approx(0.5)
