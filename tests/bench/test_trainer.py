"""The benchmark programs run, at sizes at which their figures mean nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import gpu_single
from bench.trainer.launch import run_ranks
from bench.trainer.options import ratio_to_best
from bench.trainer.shape import Shape
from bench.trainer.twins import check_twins
from trainer.model import fused

pytestmark = pytest.mark.timeout(300)


def test_a_gpt_trains_in_bf16_and_tells_where_the_time_went(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu_single.main(["--size", "toy", "--steps", "2"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert len(row["step_s"]) == 2
    assert row["model_flops_per_s"]["full"] > row["model_flops_per_s"]["windowed"] > 0
    assert row["phases_s"]["forward_backward"] > 0
    passes_s = row["passes_s"]
    assert 0 < passes_s["forward"] < passes_s["forward"] + passes_s["backward"]
    assert sum(passes_s.values()) <= row["phases_s"]["forward_backward"]
    assert set(row["twins"]) >= {"layer_norm", "bias_gated", "causal_softmax"}
    assert set(row["twins"]) >= {"windowed_attention", "vocab_loss"}


def test_saves_after_each_step_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = tmp_path / "memory"
    assert gpu_single.main(["--size", "toy", "--steps", "2", "--save", str(memory)]) == 0
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
