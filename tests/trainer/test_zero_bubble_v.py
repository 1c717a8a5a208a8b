"""ZB-V trains as 1F1B does, although both ends of the model are on one rank.

That it is the dense model's is tested in `test_parallel.py`, its cost in `test_schedule.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outlast.layout import Layout
from tests.trainer.jobs import Case, loss_and_gradients, train
from tests.trainer.jobs_zero import ZeroCase, train_cases
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import curve, make_text, spec_of, steps_of

PLAIN = {
    "pp2": Case(layout=Layout(pp=2), tied=False, dtype="fp32"),
    "tp2-pp2-sp": Case(layout=Layout(tp=2, pp=2), tied=False, dtype="fp32"),
    "pp2-dp2": Case(layout=Layout(pp=2, dp=2), tied=False, dtype="fp32", global_batch=16),
}
FOLDED: dict[str, Any] = {"schedule": "zb-v", "virtual_stages": 2}
EXPERTS = {
    "activation": "swiglu",
    "attention_bias": False,
    "mlp_bias": False,
    "moe": {"num_experts": 4, "router_aux_loss_coef": 0.1},
}


def _by_name(results: list[dict[str, Any]]) -> dict[tuple[str, tuple[int, ...]], bytes]:
    """The gradients of all ranks, wherever they are held."""
    return {
        (name, offsets): gradient.tobytes()
        for rank in results
        for name, (_, offsets, gradient) in rank["gradients"].items()
    }


@pytest.mark.parametrize("name", PLAIN)
def test_gradients_have_the_bits_of_1f1b(ranks: RankPool, name: str) -> None:
    plain = PLAIN[name]
    world = plain.layout.world_size
    cases = (plain, replace(plain, **FOLDED))
    one, other = (ranks.run_once(loss_and_gradients, world, case) for case in cases)
    assert other[0]["loss"] == one[0]["loss"]
    assert _by_name(other) == _by_name(one)


def test_a_rank_with_both_ends_holds_one_table(ranks: RankPool) -> None:
    case = Case(layout=Layout(pp=2), **FOLDED)
    results = ranks.run_once(loss_and_gradients, 2, case)
    tables = ["tokens.weight" in rank["gradients"] for rank in results]
    assert tables == [True, False]
    # Stages of 1F1B have a copy each.
    results = ranks.run_once(
        loss_and_gradients, 2, replace(case, schedule="1f1b", virtual_stages=1)
    )
    assert all("tokens.weight" in rank["gradients"] for rank in results)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_zero_level_trains_as_1f1b_does(ranks: RankPool, tied: bool) -> None:
    """A table that both ends share is gathered for both, and reduced after both."""
    layout = Layout(pp=2, dp=2)
    plain = Case(layout=layout, global_batch=16, tied=tied)
    levels = (
        ZeroCase(dtype="fp64"),
        ZeroCase(dtype="fp64", level=1),
        ZeroCase(dtype="fp64", level=2),
        ZeroCase(dtype="fp64", level=3),
        ZeroCase(dtype="fp64", level=3, reshard="micro_batch"),
        ZeroCase(dtype="fp64", level=3, reshard="micro_batch", recompute="full"),
        ZeroCase(dtype="fp64", level=3, reshard="micro_batch", recompute="offload"),
    )
    folded = tuple(replace(each, virtual_stages=2) for each in levels)
    expected = ranks.run(train_cases, 4, plain, levels[:1], 3)[0][0]["curve"]
    found = ranks.run(train_cases, 4, replace(plain, schedule="zb-v"), folded, 3)
    for rank in found:
        for case, one in zip(folded, rank, strict=True):
            assert np.allclose(one["curve"], expected, rtol=1e-9, atol=0), case


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ({}, {"tp": 2, "pp": 2}),
        ({"tied_embeddings": False}, {"tp": 2, "pp": 2, "sequence_parallel": False}),
        ({"dropout": 0.1}, {"pp": 2, "dp": 2, "zero": {"level": 1}}),
        (EXPERTS, {"pp": 2, "dp": 2, "ep": 2}),
    ],
    ids=["tied", "untied", "dropout-zero-1", "experts"],
)
def test_a_job_trains_and_evaluates_as_with_1f1b(
    ranks: RankPool, tmp_path: Path, model: dict[str, Any], parallel: dict[str, Any]
) -> None:
    make_text(tmp_path)
    found = []
    for schedule in ({"schedule": "1f1b"}, FOLDED):
        folder = tmp_path / str(schedule["schedule"])
        folder.mkdir()
        spec = spec_of(
            tmp_path,
            steps=4,
            precision="fp64",
            model={"layers": 4, "hidden": 32, "heads": 4, "seq_len": 16, **model},
            parallel={**parallel, **schedule},
            data={"source": str(tmp_path / "text.txt"), "global_batch": 8},
            eval={"interval_steps": 2, "batches": 2},
        )
        ranks.run(train, 4, folder, spec, 1)
        found.append([curve(steps_of(folder, 1, rank)) for rank in range(4)])
    (expected, *_), others = found
    assert [each[3] is None for each in expected] == [True, False, True, False]
    for other in others:
        for one, step in zip(expected, other, strict=True):
            assert _numbers(step) == pytest.approx(_numbers(one), rel=1e-9)


def _numbers(step: tuple[float | None, ...]) -> list[float]:
    return [each for each in step if each is not None]
