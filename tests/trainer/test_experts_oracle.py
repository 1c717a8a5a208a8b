"""Mixture of experts among replicas trains as `transformers` does, and changes its layout.

Three steps of AdamW in fp32, with Mixtral's loss of the router and shared experts with and without
a gate, on every layout of at most eight ranks that divides experts among one, two or four of them.
`test_oracles` holds single gradients of such layouts to `transformers`, `test_experts` others to
one rank.
"""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outlast.spec.parse import parse_spec
from tests.checkpoint import hf_training
from tests.trainer.hf_jobs import TOLERANCE, train_and_export, train_theirs
from tests.trainer.jobs import train
from tests.trainer.jobs_restore import resumed_state
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import dense_of, make_text, spec_of, steps_of, train_and_upload

# Of two for each micro-batch: one of these for each of four replicas.
SEQUENCES = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep1": {},
    "ep1-dp2": {"dp": 2},
    "ep1-tp2": {"tp": 2},
    "ep1-pp2": {"pp": 2},
    "ep1-tp2-pp2": {"tp": 2, "pp": 2, "dp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "ep2-tp2": {"tp": 2, "dp": 2, "ep": 2},
    "ep2-pp2": {"pp": 2, "dp": 2, "ep": 2, "zero": {"level": 2}},
    "ep2-tp2-pp2": {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "zero": {"level": 1}},
    "ep2-of-dp4": {"dp": 4, "ep": 2, "zero": {"level": 3}},
    "ep4": {"dp": 4, "ep": 4},
    "ep4-tp2": {"tp": 2, "dp": 4, "ep": 4, "sequence_parallel": False},
    "ep4-pp2": {"pp": 2, "dp": 4, "ep": 4, "zero": {"level": 1}},
}
RUNS = [f"mixtral@{name}" for name in LAYOUTS]
RUNS += [
    f"{model}@{name}" for model in ("granite-moe", "qwen2-moe") for name in ("ep2-tp2-pp2", "ep4")
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `transformers` has trained, on what our jobs will read."""
    folder = tmp_path_factory.mktemp("experts")
    train_theirs(folder, *{hf_training.model_of(run) for run in RUNS}, sequences=SEQUENCES)
    return folder


@pytest.fixture(scope="module")
def differences(ranks: RankPool, trained: Path) -> dict[str, tuple[float, float]]:
    """Of logits and of weights, by run, once our jobs have trained the same."""
    for run in RUNS:
        layout = LAYOUTS[run.partition("@")[2]]
        train_and_export(ranks, trained, run, layout, sequences=SEQUENCES)
    found: dict[str, tuple[float, float]] = json.loads(hf_training.run("compare", trained))
    return found


@pytest.mark.parametrize("run", RUNS)
def test_experts_train_as_in_transformers_on_every_layout(
    trained: Path, differences: dict[str, tuple[float, float]], run: str
) -> None:
    expected = json.loads((trained / "losses.json").read_text())[hf_training.model_of(run)]
    losses = [record.loss for record in steps_of(trained / "jobs" / run, 1, 0)]
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    logits, weights = differences[run]
    assert logits <= TOLERANCE
    assert weights <= TOLERANCE


MODEL = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "seq_len": 16,
    "activation": "swiglu",
    "mlp_bias": False,
    "moe": {
        "num_experts": 4,
        "ffn_hidden": 24,
        "shared_ffn_hidden": 20,
        "pattern": ["dense", "experts"],
        "router_aux_loss_coef": 0.05,
    },
}
# Each goes on from what the one before has saved after two more steps.
ONE_AFTER_ANOTHER: list[dict[str, Any]] = [
    {"tp": 2, "pp": 2},
    {"tp": 2, "dp": 2, "ep": 2, "zero": {"level": 1}},
    {"pp": 2, "dp": 4, "ep": 4},
    {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "zero": {"level": 2}},
]


def test_divided_experts_go_from_layout_to_layout_to_the_bit(
    ranks: RankPool, tmp_path: Path
) -> None:
    """ep 1 to 2 to 4 to 2: parameters and both moments of each checkpoint, and the losses."""
    make_text(tmp_path)
    last = 2 * len(ONE_AFTER_ANOTHER)

    def job(parallel: dict[str, Any]) -> dict[str, Any]:
        return spec_of(
            tmp_path,
            steps=last,
            model=MODEL,
            parallel=parallel,
            precision="fp64",
            optimizer={"lr": 0.01},
            eval={"interval_steps": None},
            checkpoint={"storage_interval_steps": 2},
        )

    specs = [job(parallel) for parallel in ONE_AFTER_ANOTHER]
    losses: list[float] = []
    for attempt, (spec, following) in enumerate(pairwise(specs), start=1):
        train_and_upload(ranks, tmp_path, spec, attempt=attempt, stop_after=2)
        losses += [each.loss for each in steps_of(tmp_path, attempt, 0)]
        expected = ranks.run(resumed_state, parse_spec(spec).layout.world_size, tmp_path, spec)
        shutil.rmtree(tmp_path / "memory")
        found = ranks.run(
            resumed_state, parse_spec(following).layout.world_size, tmp_path, following
        )
        for states, source in ((expected, "host memory"), (found, "storage")):
            assert {(each["step"], each["source"]) for each in states} == {(2 * attempt, source)}
        whole, back = dense_of(expected), dense_of(found)
        assert whole.keys() == back.keys()
        assert {"model.", "optim."} == {name[:6] for name in whole if ".experts." in name}
        for name, values in whole.items():
            assert values.tobytes() == back[name].tobytes(), name
    ranks.run(train, parse_spec(specs[-1]).layout.world_size, tmp_path, specs[-1], len(specs))
    losses += [each.loss for each in steps_of(tmp_path, len(specs), 0)]

    (tmp_path / "alone").mkdir()
    ranks.run(train, 1, tmp_path / "alone", job({}), 1)
    alone = [each.loss for each in steps_of(tmp_path / "alone", 1, 0)]
    assert losses == pytest.approx(alone, rel=1e-9)
