"""Inputs of recomputed blocks in host memory: the same numbers, and back before they are needed."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.test_estimate import plan_of
from trainer.model import recompute as recompute_module
from trainer.model.offload import InHostMemory
from trainer.model.recompute import recompute_all

DEPTH = 4


class _Noted(InHostMemory):
    """Notes when copies back begin."""

    made: ClassVar[list[_Noted]] = []
    begun: ClassVar[list[int]] = []
    computed: ClassVar[list[int]] = []

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.number = len(self.made)
        self.made.append(self)

    def bring_back(self) -> None:
        if self._back is None:
            self.begun.append(self.number)
        super().bring_back()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> type[_Noted]:
    _Noted.made, _Noted.begun, _Noted.computed = [], [], []
    monkeypatch.setattr(recompute_module, "InHostMemory", _Noted)
    return _Noted


def _forward(layers: list[nn.Linear], x: Tensor, *, offload: bool | None) -> Tensor:
    for number, layer in enumerate(layers):

        def run(x: Tensor, number: int = number, layer: nn.Linear = layer) -> tuple[Tensor]:
            _Noted.computed.append(number)
            return (torch.tanh(layer(x)),)

        (x,) = run(x) if offload is None else recompute_all(run, x, offload=offload)
    return x


def gradients(layers: list[nn.Linear], x: Tensor, *, offload: bool | None) -> list[Tensor]:
    for tensor in (x, *(layer.weight for layer in layers)):
        tensor.grad = None
    _forward(layers, x, offload=offload).sum().backward()
    found = [tensor.grad for tensor in (x, *(layer.weight for layer in layers))]
    return [gradient for gradient in found if gradient is not None]


def test_gradients_are_bitwise_those_of_parts_that_keep_everything(noted: type[_Noted]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(DEPTH)]
    # Bits may depend on how a tensor lies in memory.
    x = torch.randn(8, 3).t().requires_grad_()
    plain = gradients(layers, x, offload=None)
    assert len(plain) == DEPTH + 1
    for one, other in zip(plain, gradients(layers, x, offload=True), strict=True):
        assert torch.equal(one, other)
    assert len(noted.made) == DEPTH


def test_what_the_part_before_keeps_is_on_its_way_while_one_is_computed(
    noted: type[_Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [nn.Linear(8, 8) for _ in range(DEPTH)]
    out = _forward(layers, torch.randn(3, 8, requires_grad=True), offload=True)
    noted.computed.clear()
    begun_by: dict[int, list[int]] = {}

    class _Computed(list[int]):
        def append(self, number: int) -> None:
            begun_by[number] = list(noted.begun)

    monkeypatch.setattr(noted, "computed", _Computed())
    out.sum().backward()
    assert begun_by == {3: [3, 2], 2: [3, 2, 1], 1: [3, 2, 1, 0], 0: [3, 2, 1, 0]}


def test_micro_batches_in_flight_do_not_bring_back_each_others(noted: type[_Noted]) -> None:
    """As a pipeline has them: forward passes of two, then their backward passes in order."""
    layers = [nn.Linear(8, 8) for _ in range(DEPTH)]
    one, _other = (
        _forward(layers, torch.randn(3, 8, requires_grad=True), offload=True) for _ in range(2)
    )
    one.sum().backward()
    assert noted.begun == [3, 2, 1, 0]


def test_a_pass_without_gradients_copies_nothing(noted: type[_Noted]) -> None:
    layers = [nn.Linear(8, 8) for _ in range(DEPTH)]
    with torch.no_grad():
        _forward(layers, torch.randn(3, 8), offload=True)
    assert noted.made == []


def test_a_plan_counts_it_in_host_memory() -> None:
    parallel = {"pp": 2, "micro_batch": 2}
    full, offload = (
        plan_of(model={"layers": 16}, parallel={**parallel, "recompute": mode}).ranks
        for mode in ("full", "offload")
    )
    for kept, moved in zip(full, offload, strict=True):
        assert kept.host_activations_bytes == 0
        assert moved.host_activations_bytes > 0
        assert kept.activations_bytes - moved.activations_bytes == moved.host_activations_bytes
        # The next one is on its way while one is computed.
        assert moved.device_bytes < kept.device_bytes
