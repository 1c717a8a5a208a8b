"""ZB-H1 trains as 1F1B does, bit by bit: each sum over micro-batches is in the same order.

That it is the dense model's is tested in `test_parallel.py`, its cost in `test_schedule.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.blackbox import Group
from outlast.layout import Layout
from tests.trainer.jobs import Case, loss_and_gradients, train
from tests.trainer.jobs_zero import ZeroCase, train_cases
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import make_text, spec_of
from trainer.parallel.comm import Comm
from trainer.parallel.overlap import TensorParallel
from trainer.parallel.tensor import column_linear, row_linear
from trainer.parallel.weight_gradients import add_up

LAYOUTS = {
    "pp2": Case(layout=Layout(pp=2), tied=False),
    "pp4": Case(layout=Layout(pp=4)),
    # Fewer micro-batches than stages, and stages of different sizes.
    "pp3-few": Case(layout=Layout(pp=3), global_batch=4),
    "tp2-pp2": Case(layout=Layout(tp=2, pp=2), sequence_parallel=False),
    "tp2-pp2-sp": Case(layout=Layout(tp=2, pp=2)),
    "tp2-pp2-dp2-sp": Case(layout=Layout(tp=2, pp=2, dp=2), global_batch=16),
}
ZERO = (
    ZeroCase(),
    ZeroCase(level=1),
    ZeroCase(level=2),
    ZeroCase(level=3),
    ZeroCase(level=3, reshard="micro_batch"),
)
DENSE: dict[str, Any] = {"layers": 4, "hidden": 32, "heads": 4, "seq_len": 16}
EXPERTS = {
    **DENSE,
    "activation": "swiglu",
    "attention_bias": False,
    "mlp_bias": False,
    "moe": {"num_experts": 4, "shared_ffn_hidden": 32, "router_aux_loss_coef": 0.1},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_have_the_bits_of_1f1b(ranks: RankPool, name: str) -> None:
    plain = replace(LAYOUTS[name], dtype="fp32")
    split = replace(plain, schedule="zb-h1")
    world = plain.layout.world_size
    one, other = (ranks.run_once(loss_and_gradients, world, case) for case in (plain, split))
    for expected, found in zip(one, other, strict=True):
        assert (found["loss"], found["norm"]) == (expected["loss"], expected["norm"])
        for parameter, (_, _, gradient) in expected["gradients"].items():
            assert found["gradients"][parameter][2].tobytes() == gradient.tobytes(), parameter


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pp2-dp2", {}),
        ("tp2-pp2-dp2", {}),
        ("pp2-dp2", {"recompute": "full", "dtype": "bf16"}),
        ("tp2-pp2-dp2", {"recompute": "selective", "block": "parallel"}),
    ],
    ids=["pp2-dp2", "tp2-pp2-dp2", "full-recompute-bf16", "parallel-block"],
)
def test_every_zero_level_trains_with_the_bits_of_1f1b(
    ranks: RankPool, name: str, change: dict[str, Any]
) -> None:
    """Sums over replicas wait for the last gradients of weights, whatever is kept of them."""
    layout = Layout(tp=2 if "tp2" in name else 1, pp=2, dp=2)
    plain = Case(layout=layout, global_batch=16)
    cases = tuple(replace(case, **change) for case in ZERO)
    results = [
        ranks.run(train_cases, layout.world_size, case, cases, 3)
        for case in (plain, replace(plain, schedule="zb-h1"))
    ]
    for expected, found in zip(*results, strict=True):
        for case, one, other in zip(cases, expected, found, strict=True):
            assert other["curve"] == one["curve"], case
            assert _bits(other) == _bits(one), case


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (DENSE, {"tp": 2, "pp": 2}),
        (DENSE, {"tp": 2, "pp": 2, "sequence_parallel": False}),
        # Both ranks gather the one key/value head's weights.
        ({**DENSE, "kv_heads": 1}, {"tp": 2, "pp": 2}),
        (EXPERTS, {"tp": 2, "pp": 2, "recompute": "full"}),
        (EXPERTS, {"pp": 2, "dp": 2, "ep": 2, "zero": {"level": 1}}),
    ],
    ids=["overlap-sp", "overlap", "shared-head", "experts-tp2", "experts-ep2"],
)
def test_a_job_trains_with_the_bits_of_1f1b(
    ranks: RankPool, tmp_path: Path, model: dict[str, Any], parallel: dict[str, Any]
) -> None:
    make_text(tmp_path)
    found = []
    for schedule in ("1f1b", "zb-h1"):
        folder = tmp_path / schedule
        folder.mkdir()
        spec = spec_of(
            tmp_path,
            steps=4,
            model=model,
            parallel={**parallel, "schedule": schedule},
            data={"source": str(tmp_path / "text.txt"), "global_batch": 8},
        )
        found.append(ranks.run(train, 4, folder, spec, 1))
    assert [rank["state"] for rank in found[0]] == [rank["state"] for rank in found[1]]
    assert {rank["code"] for each in found for rank in each} == {found[0][0]["code"]}


def test_a_weight_has_its_gradient_when_it_is_added_up() -> None:
    """Others have theirs at once; and twice the same pass adds up as it does unsplit."""
    torch.manual_seed(0)
    alone = Comm(group=Group.TP, ranks=(0,), index=0)
    tp = TensorParallel(comm=alone, sequence_parallel=False)
    x = torch.randn(3, 2, 4, requires_grad=True)
    up = torch.randn(6, 4, requires_grad=True)
    down = torch.randn(2, 2, 6, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)

    def loss() -> torch.Tensor:
        # One weight is a view of its parameter, as those of gated MLPs are.
        hidden = column_linear(x, up, bias, tp)
        return row_linear(hidden.sigmoid(), down.view(4, 6), None, tp).square().sum()

    leaves = (x, up, down, bias)
    for _ in range(2):
        loss().backward()  # type: ignore[no-untyped-call]
    expected = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    waiting, tp.weight_gradients.splits = [], True
    for _ in range(2):
        with tp.weight_gradients.put_off() as products:
            loss().backward()  # type: ignore[no-untyped-call]
        waiting.append(products)
    assert up.grad is None
    assert down.grad is None
    assert bias.grad is not None
    for products in waiting:
        add_up(products)
        assert not products
    for leaf, grad in zip(leaves, expected, strict=True):
        assert grad is not None
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, grad)


def _bits(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(*place, values.tobytes()) for *place, values in result["shards"]]
