"""Models of Hugging Face train as in `transformers`: in, three steps on four ranks, and out.

All of it in fp32 and through what a user runs: an import, a job that begins with it, its
checkpoint and the export of that.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint import hf_training
from tests.trainer.hf_jobs import TOLERANCE, train_and_export, train_theirs
from tests.trainer.hf_models import CONFIGS
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import steps_of

# The first test waits for all models.
pytestmark = pytest.mark.timeout(1200)

SEQUENCES, LAYOUT = 4, {"tp": 2, "pp": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models that `transformers` has trained on what our job will read."""
    folder = tmp_path_factory.mktemp("models")
    train_theirs(folder, sequences=SEQUENCES)
    return folder


@pytest.fixture(scope="module")
def differences(ranks: RankPool, trained: Path) -> dict[str, tuple[float, float]]:
    """Of logits and of weights, by name, once our job has trained the same."""
    for name in CONFIGS:
        train_and_export(ranks, trained, name, LAYOUT, sequences=SEQUENCES)
    found: dict[str, tuple[float, float]] = json.loads(hf_training.run("compare", trained))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_trains_as_in_transformers(
    trained: Path, differences: dict[str, tuple[float, float]], name: str
) -> None:
    losses = [record.loss for record in steps_of(trained / "jobs" / name, 1, 3)]
    expected = json.loads((trained / "losses.json").read_text())[name]
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    logits, weights = differences[name]
    assert logits <= TOLERANCE
    assert weights <= TOLERANCE
