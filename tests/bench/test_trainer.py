"""The benchmark programs run, at sizes at which their figures mean nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import gpu_single
from bench.baselines.single_gpu import Plain, PlainGpt
from bench.trainer.launch import run_ranks
from bench.trainer.options import ratio_to_best
from bench.trainer.shape import Shape
from bench.trainer.twins import check_twins
from tests.trainer.alone import CPU, batch_on, job, loss_and_gradients, model_on
from trainer.model import fused

pytestmark = pytest.mark.timeout(300)


def test_a_gpt_trains_in_bf16_and_tells_where_the_time_went(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu_single.main(["--size", "toy", "--steps", "2", "--plain", "eager"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert len(row["step_s"]) == 2
    assert row["model_flops_per_s"]["full"] > row["model_flops_per_s"]["windowed"] > 0
    assert row["phases_s"]["forward_backward"] > 0
    passes_s = row["passes_s"]
    assert 0 < passes_s["forward"] < passes_s["forward"] + passes_s["backward"]
    assert sum(passes_s.values()) <= row["phases_s"]["forward_backward"]
    assert set(row["twins"]) >= {"layer_norm", "bias_gated", "causal_softmax"}
    assert set(row["twins"]) >= {"windowed_attention", "vocab_loss"}
    plain = row["plain"]["eager"]
    assert plain["parameters"] == row["parameters"]
    assert row["speed_vs_plain"] == pytest.approx(plain["median_step_s"] / row["median_step_s"])


def test_the_baseline_in_plain_torch_is_the_same_model() -> None:
    """Or their times mean nothing: the same loss and gradients, of the same weights."""
    parallel = {"block": "parallel", "positions": "rope", "hidden": 64, "heads": 2, "seq_len": 64}
    spec = job("fp64", **parallel, attention_bias=False, mlp_bias=False)
    loss, gradients = loss_and_gradients(CPU, spec)
    plain = PlainGpt(spec).double()
    plain.load_state_dict(model_on(CPU, spec).state_dict())
    tokens_SB, targets_SB = batch_on(CPU, spec)
    found = plain(tokens_SB.t(), targets_SB.t()) / targets_SB.numel()
    found.backward()
    # Its loss is computed in fp32.
    assert found.item() == pytest.approx(loss, rel=1e-6)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients.pop(name), rtol=1e-5, atol=1e-7)
    assert not gradients


def test_the_baseline_learns_a_batch() -> None:
    spec = job("bf16", block="parallel", positions="rope", attention_bias=False, mlp_bias=False)
    plain = Plain(spec, device=CPU, compiled=False)
    losses = [plain.step(0) for _ in range(20)]
    assert losses[0] == pytest.approx(math.log(512), rel=0.02)
    assert losses[-1] < 0.9 * losses[0]


def test_saves_after_each_step_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = tmp_path / "memory"
    assert (
        gpu_single.main(["--size", "toy", "--steps", "2", "--plain", "none", "--save", str(memory)])
        == 0
    )
    row = json.loads(capsys.readouterr().out)
    assert row["saved_step_s"] > 0
    assert row["copy_s"] > 0
    assert row["state_bytes"] >= 12 * row["parameters"]
    assert not memory.exists()


def test_a_wrong_gradient_of_a_fused_operation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are right: only what flows back through them is off."""
    right = fused.rms_norm

    def wrong(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        value = right(x, weight, eps)
        return value + 0.2 * (value - value.detach())

    monkeypatch.setattr(fused, "rms_norm", wrong)
    with pytest.raises(ValueError, match=r"differ from their eager twins: \{'rms_norm'"):
        check_twins(torch.device("cpu"))


def test_a_large_model_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_single.main(["--size", "7b"]) == 2
    assert "only --size toy" in capsys.readouterr().err


def test_ours_and_the_baseline_take_turns() -> None:
    shape = replace(Shape(tp=2).smaller(), seq_len=16)
    arguments = {"shape": shape.document(), "rounds": 1, "baseline": True}
    row = run_ranks("compare", arguments, world_size=2, timeout_s=200)
    assert set(row["step_s"]) == {"ours", "native", "native_exchange"}
    assert ratio_to_best(row) > 0
    assert row["sent_bytes"] > 0
