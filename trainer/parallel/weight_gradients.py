"""Gradients of weight matrices, put off until nobody waits for the rank.

A backward pass multiplies the gradient of a linear layer's output twice: by the weights, for the
gradient of the layer's input, which the stage before waits for; and by the input, for the
gradient of the weights, which nobody waits for. A schedule with split backwards does the second
part later. Until then both factors are kept, each as the rank's own part: what other ranks of a
tensor group have of them is gathered when it is used.

Only products of linear layers are put off, those of a layer's experts included. Gradients of
biases, norms, embedding tables and routers, of shared experts and of what BERT has before its
output are computed with the pass; those of the output projection with the loss
(`trainer.parallel.vocab`).

Source: Qi et al. (arXiv 2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from trainer.parallel.backward import backward_all


class _Product(NamedTuple):
    weight: Tensor
    compute: Callable[..., Tensor]
    factors: tuple[Tensor, ...]


Products: TypeAlias = deque[_Product]


class WeightGradients:
    """Where the linear layers of a rank leave the gradients of their weights.

    `splits`: what is computed from now on has a backward pass in two parts.
    """

    def __init__(self) -> None:
        self.splits = False
        self.products: Products | None = None

    def use(self, weight: Tensor, x: Tensor) -> tuple[Tensor, WeightGradient]:
        """The weight as a product with `x` takes it, and what that does with its gradient."""
        if not (self.splits and torch.is_grad_enabled()):
            return weight, WeightGradient(self, None)
        assert x.requires_grad, "or no backward pass would come to this product"
        # Autograd must not come to the weight: what waits for its gradient would take none for it.
        return weight.detach(), WeightGradient(self, weight)

    @contextmanager
    def put_off(self) -> Iterator[Products]:
        """Keep the products of the backward pass inside; they are for `add_up`."""
        products: Products = deque()
        self.products = products
        try:
            yield products
        finally:
            self.products = None


class WeightGradient:
    """That of one use of a weight; `is_put_off`: autograd is not to have it."""

    __slots__ = ("_of", "_weight")

    def __init__(self, of: WeightGradients, weight: Tensor | None) -> None:
        self._of = of
        self._weight = weight

    @property
    def is_put_off(self) -> bool:
        return self._weight is not None

    def made(self, compute: Callable[..., Tensor], *factors: Tensor) -> Tensor | None:
        """`compute(*factors)`; None where that is put off."""
        if self._weight is None:
            return compute(*factors)
        products = self._of.products
        assert products is not None, "a pass that is split has a place for its products"
        # What the factors were made of is not needed any more.
        kept = tuple(factor.detach() for factor in factors)
        products.append(_Product(self._weight, compute, kept))
        return None


def add_up(products: Products) -> None:
    """Compute what was put off, one after the other, and add it to the weights' gradients."""
    while products:
        weight, compute, factors = products.popleft()
        with torch.no_grad():
            grad = compute(*factors)
        backward_all((weight,), (grad,))
