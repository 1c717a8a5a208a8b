"""Each fused operation equals its eager twin: values and every gradient, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.model import fused


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


KEEP = (torch.arange(60).view(3, 4, 5) % 3 > 0).double() * 1.5
BAND = fused.causal_mask(4, 7, device=torch.device("cpu")).triu(1)
PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Any, ...]]] = {
    "layer_norm": (
        fused.layer_norm,
        fused.eager_layer_norm,
        (_random(3, 4, 5), _random(5), _random(5, seed=1), 1e-5),
    ),
    "layer_norm without bias": (
        fused.layer_norm,
        fused.eager_layer_norm,
        (_random(3, 4, 5), _random(5), None, 1e-5),
    ),
    "rms_norm": (
        fused.rms_norm,
        fused.eager_rms_norm,
        (_random(3, 4, 5), _random(5), 1e-5),
    ),
    "bias_activation": (
        fused.bias_activation,
        fused.eager_bias_activation,
        (_random(3, 4, 5), _random(5), "gelu"),
    ),
    "bias_activation by tanh": (
        fused.bias_activation,
        fused.eager_bias_activation,
        (_random(3, 4, 5), _random(5), "gelu_tanh"),
    ),
    **{
        f"bias_activation with {kind}": (
            fused.bias_activation,
            fused.eager_bias_activation,
            (_random(3, 4, 5), _random(5), kind),
        )
        for kind in ("relu", "relu2")
    },
    **{
        f"bias_gated with {kind}": (
            fused.bias_gated,
            fused.eager_bias_gated,
            (_random(3, 4, 5), _random(3, 4, 5, seed=1), _random(5), _random(5, seed=1), kind),
        )
        for kind in ("swiglu", "geglu", "geglu_tanh")
    },
    "norms without weights": (
        lambda x: fused.layer_norm(x, None, None, 1e-5) + fused.rms_norm(x, None, 1e-5),
        lambda x: fused.eager_layer_norm(x, None, None, 1e-5) + fused.eager_rms_norm(x, None, 1e-5),
        (_random(3, 4, 5),),
    ),
    "bias_dropout_add": (
        fused.bias_dropout_add,
        fused.eager_bias_dropout_add,
        (_random(3, 4, 5), _random(5), _random(3, 4, 5, seed=1), KEEP),
    ),
    "bias_dropout_add without either": (
        fused.bias_dropout_add,
        fused.eager_bias_dropout_add,
        (_random(3, 4, 5), None, _random(3, 4, 5, seed=1), None),
    ),
    "masked_softmax": (
        fused.masked_softmax,
        fused.eager_masked_softmax,
        (_random(2, 3, 4, 7), BAND, 0.3),
    ),
    "causal_softmax": (
        fused.causal_softmax,
        fused.eager_causal_softmax,
        (_random(2, 3, 6, 6), 0.3),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_operation_equals_its_eager_twin(name: str) -> None:
    operation, twin, arguments = PAIRS[name]
    found, expected = operation(*arguments), twin(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    inputs = [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
    # Weights that differ, so that no gradient cancels out.
    weights = torch.linspace(0.5, 2.0, found.numel(), dtype=torch.float64).view(found.shape)
    for own, other in zip(
        torch.autograd.grad(found, inputs, weights),
        torch.autograd.grad(expected, inputs, weights),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-13)


def test_all_blocks_of_a_window_share_a_few_graphs() -> None:
    """A new graph for each block would pass dynamo's limit of 8, and run uncompiled."""
    # Here: with all of torch's compilers, which no other test needs.
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    softmax = fused.compiled(fused.eager_masked_softmax, dynamic=True, backend=counter)
    blocks = [(64, 64), (64, 128), (64, 192), (64, 256), (64, 319), (40, 295)]
    for queries, keys in blocks:
        allowed = fused.causal_mask(queries, keys, device=torch.device("cpu"))
        scores = torch.zeros(2, 3, 4, queries, keys, requires_grad=True)
        expected = fused.eager_masked_softmax(scores, allowed, 0.3)
        torch.testing.assert_close(softmax(scores, allowed, 0.3), expected)
        with torch.no_grad():
            torch.testing.assert_close(softmax(scores, allowed, 0.3), expected)
    # With gradients and without; a block whose queries are its keys has a graph of its own.
    assert counter.frame_count <= 4


def test_gradient_of_the_masked_softmax() -> None:
    scores = _random(2, 4, 7)
    assert torch.autograd.gradcheck(lambda x: fused.masked_softmax(x, BAND, 0.7), scores)


def test_gradients_of_the_rms_norm() -> None:
    inputs = (_random(3, 4, 5), _random(5))
    assert torch.autograd.gradcheck(lambda x, w: fused.rms_norm(x, w, 1e-5), inputs)


def test_a_forbidden_place_has_no_weight() -> None:
    weights = fused.masked_softmax(_random(2, 4, 7), BAND, 1.0)
    assert (weights[:, ~BAND] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, dtype=torch.float64))
