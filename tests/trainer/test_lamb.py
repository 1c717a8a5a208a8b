"""LAMB beside timm's, step for step, for the dense model and for every way to cut it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outlast.layout import Layout
from tests.trainer.jobs import Case
from tests.trainer.jobs_zero import ZeroCase, gradient_like, optimizer_steps, whole_model
from tests.trainer.ranks import RankPool
from tests.trainer.test_zero import joined
from trainer.optim.lamb import LambConfig

STEPS = 5
CUTS = {
    "dense": (Case(layout=Layout()), 0),
    "dp2-zero0": (Case(layout=Layout(dp=2)), 0),
    "dp2-zero1": (Case(layout=Layout(dp=2)), 1),
    "dp4-zero2": (Case(layout=Layout(dp=4)), 2),
    "tp2-dp2-zero3": (Case(layout=Layout(tp=2, dp=2)), 3),
    "tp2-pp2-dp2-zero3": (Case(layout=Layout(tp=2, pp=2, dp=2)), 3),
}


@pytest.mark.parametrize("name", CUTS)
def test_lamb_equals_timms_step_for_step(ranks: RankPool, name: str) -> None:
    """fp64 to 1e-12: trust ratios see whole tensors, however they are cut."""
    layout, level = CUTS[name]
    case = ZeroCase(level=level, dtype="fp64")
    results = ranks.run(optimizer_steps, layout.layout.world_size, layout, case, STEPS, None)
    for done in range(STEPS):
        weights = joined([{"shards": found[done]} for found in results])
        for parameter, expected in timm_weights()[done].items():
            np.testing.assert_allclose(
                weights[parameter], expected, rtol=1e-12, atol=1e-13, err_msg=parameter
            )


@pytest.mark.parametrize(("phi_min", "phi_max"), [(0.0, 0.25), (50.0, None), (0.0, None)])
def test_phi_bounds_how_far_a_tensor_moves(phi_min: float, phi_max: float | None) -> None:
    """Algorithm 2 of arXiv 1904.00962: |new x - x| = lr * phi(|x|)."""
    flat, lamb = whole_model(ZeroCase(dtype="fp64"), phi_min=phi_min, phi_max=phi_max)
    before = flat.values.clone()
    flat.grads.normal_(generator=torch.Generator().manual_seed(1))
    lamb.step(1, 0.01)
    phi = LambConfig(adam=lamb.config.adam, phi_min=phi_min, phi_max=phi_max).phi
    for name, facts in flat.facts.items():
        old, new = flat.view(before, name), flat.view(flat.values, name)
        if facts.decays:
            expected = 0.01 * phi(float(old.norm()))
            assert float((new - old).norm()) == pytest.approx(expected, rel=1e-9), name


def test_a_tensor_of_zeros_moves_as_with_adamw() -> None:
    flat, lamb = whole_model(ZeroCase(dtype="fp64"), phi_min=0.0, phi_max=None)
    name = next(name for name, facts in flat.facts.items() if facts.decays)
    flat.view(flat.values, name).zero_()
    flat.grads.fill_(1.0)
    lamb.step(1, 0.01)
    moved = flat.view(flat.values, name)
    torch.testing.assert_close(moved, torch.full_like(moved, -0.01), rtol=1e-6, atol=0)


_timm: list[dict[str, Any]] = []


def timm_weights() -> list[dict[str, Any]]:
    """The weights of the dense model after each step of timm's LAMB."""
    if _timm:
        return _timm
    flat, lamb = whole_model(ZeroCase(dtype="fp64"), phi_min=0.0, phi_max=None)
    copies = {name: flat.view(flat.values, name).clone().requires_grad_() for name in flat.facts}
    adam = lamb.config.adam
    theirs = _lamb_of_timm()(
        [
            {"params": [p for p in copies.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in copies.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.02,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        max_grad_norm=None,
    )
    for step in range(1, STEPS + 1):
        for name, copy in copies.items():
            copy.grad = gradient_like(flat.facts[name], name, step).double()
        theirs.step()
        _timm.append({name: copy.detach().numpy().copy() for name, copy in copies.items()})
    return _timm


def _lamb_of_timm() -> Any:
    """timm's class without timm's package, whose import needs torchvision."""
    spec = importlib.util.find_spec("timm")
    assert spec is not None, "make installs timm"
    assert spec.origin is not None, "timm is a package with an __init__.py"
    root = Path(spec.origin).parent
    for name, folder in (("timm", root), ("timm.optim", root / "optim")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return importlib.import_module("timm.optim.lamb").Lamb
