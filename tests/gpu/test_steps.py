"""The whole model on a GPU, beside the same model in fp64 on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.trainer.twins import check_twins
from tests.trainer.alone import CPU, job, loss_and_gradients

MODELS: dict[str, dict[str, Any]] = {
    "serial": {},
    "parallel": {
        "block": "parallel",
        "activation": "swiglu",
        "norm": "rmsnorm",
        "kv_heads": 2,
        "positions": "rope",
        # FlexAttention in one layer, SDPA in the other.
        "window": 100,
        "window_pattern": ["local", "global"],
        "attention_bias": False,
        "mlp_bias": False,
    },
}
# Of a parameter's gradient, as a share of its norm. CPUs are off by 7e-7, 0.055 and 0.0033; a
# gradient that lacks a term is off by about 1. The loss scale of fp16 keeps small ones from 0.
TOLERANCES = {"fp32": (1e-3, 1.0), "bf16": (0.1, 1.0), "fp16": (0.02, 1024.0)}


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_the_loss_and_the_gradients_of_fp64(
    device: torch.device, name: str, precision: str
) -> None:
    tolerance, scale = TOLERANCES[precision]
    expected_loss, expected = loss_and_gradients(CPU, job("fp64", **MODELS[name]))
    loss, found = loss_and_gradients(device, job(precision, **MODELS[name]), scale=scale)
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    off = {
        parameter: float((gradient - expected[parameter]).norm() / expected[parameter].norm())
        for parameter, gradient in found.items()
    }
    assert off.keys() == expected.keys()
    assert {name: value for name, value in off.items() if not value <= tolerance} == {}


def test_operations_in_bf16_round_as_their_eager_twins_in_fp32(device: torch.device) -> None:
    """`check_twins` raises where a result or a gradient is off by more."""
    assert max(check_twins(device).values()) > 0
