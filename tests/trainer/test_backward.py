"""The backward pass from a gradient: torch's own, bit for bit, without its imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.parallel.backward import backward


def gradients(run: Callable[[Tensor, Tensor], None], *, seed: int) -> list[Tensor | None]:
    """Of a small model's input and parameters."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    inputs = torch.randn(4, 8, requires_grad=True)
    grad = torch.randn(4, 8)
    # Twice, so that gradients add up.
    run(model(inputs), grad)
    run(model(inputs), -3 * grad)
    return [tensor.grad for tensor in (inputs, *model.parameters())]


@pytest.mark.parametrize("seed", range(5))
def test_gradients_are_those_of_torch(seed: int) -> None:
    ours = gradients(backward, seed=seed)
    for mine, wanted in zip(ours, gradients(torch.autograd.backward, seed=seed), strict=True):
        assert mine is not None
        assert wanted is not None
        assert torch.equal(mine, wanted)


def test_a_scalar_needs_no_gradient_and_a_gradient_no_recording() -> None:
    leaf = torch.ones(3, requires_grad=True)
    backward(leaf.sum(), None)
    output = leaf * 2
    with torch.no_grad():
        backward(output, torch.ones(3))
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0, 3.0, 3.0]


def test_a_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"got \[4\] but expected shape compatible with \[3\]"):
        backward(torch.ones(3, requires_grad=True) * 2, torch.ones(4))


def test_a_standby_process_and_a_backward_pass_import_no_sympy() -> None:
    program = (
        "import importlib, sys\n"
        "from trainer.worker.standby_options import ENTRY, PRELOADED_MODULES\n"
        "for name in (*PRELOADED_MODULES, ENTRY.partition(':')[0]):\n"
        "    importlib.import_module(name)\n"
        "import torch\n"
        "from trainer.model.recompute import recompute\n"
        "from trainer.parallel.backward import backward\n"
        "leaf = torch.ones(3, requires_grad=True)\n"
        "backward(recompute(torch.exp, leaf), torch.ones(3))\n"
        "assert leaf.grad is not None\n"
        "sys.exit('sympy' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
