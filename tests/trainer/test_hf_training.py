"""Models of Hugging Face train as in `transformers`: in, three steps on four ranks, and out.

All of it in fp32 and through what a user runs: an import, a job that begins with it, its
checkpoint and the export of that.
"""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from checkpoint.hf.convert import import_folder
from checkpoint.hf.export import export_folder
from checkpoint.storage.storage import Storage
from outlast.spec.parse import parse_spec
from outlast.worker_contract import WorkerExitCode
from tests.checkpoint import hf_training
from tests.trainer.hf_models import CONFIGS, SEQ_LEN, VOCAB
from tests.trainer.jobs import train
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import steps_of, upload_all
from trainer.parallel.mesh import Mesh
from trainer.worker.feeding import open_data

STEPS, SEQUENCES = 3, 4
KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "masked": {"attention": "bidirectional"},
    "ordered": {"attention": "bidirectional", "segments": 2, "sentence_order": True},
}
LAYOUT = {"tp": 2, "pp": 2, "micro_batch": 2}
# Of losses and weights, and of logits in parts of the largest.
TOLERANCE = 1e-5


def spec_of(folder: Path, model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    (beta1, beta2), tokens = hf_training.BETAS, str(folder / "tokens.npy")
    data = {"tokens": tokens, "validation_tokens": tokens, "global_batch": SEQUENCES}
    if model.get("attention") == "bidirectional":
        data["masked"] = {"fraction": 0.15, "mask_token": 7, "never": [8, 9]}
    if model.get("sentence_order"):
        data["sentence_order"] = {"cls_token": 8, "sep_token": 9}
    document = {
        "name": "job",
        "steps": STEPS,
        "model": {**model, "seq_len": SEQ_LEN},
        "data": data,
        "optimizer": {
            "lr": hf_training.LR,
            "beta1": beta1,
            "beta2": beta2,
            "eps": hf_training.EPS,
            "weight_decay": hf_training.DECAY,
            "clip_grad_norm": hf_training.CLIP,
            "schedule": {"name": "constant", "warmup_steps": 0},
        },
        "eval": {"interval_steps": None},
        **sections,
    }
    return parse_spec(document).model_dump(mode="json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models that `transformers` has trained on what our job will read."""
    folder = tmp_path_factory.mktemp("models")
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, VOCAB, 4 * SEQUENCES * SEQ_LEN + 1, dtype=np.uint16)
    np.save(folder / "tokens.npy", tokens)
    mesh = SimpleNamespace(
        at=SimpleNamespace(dp=0),
        device=torch.device("cpu"),
        is_first_stage=True,
        is_last_stage=True,
    )
    for kind, model in KINDS.items():
        spec = parse_spec(spec_of(folder, {"vocab_size": VOCAB, **model}))
        data = open_data(spec, cast(Mesh, mesh), folder)
        batches = [data.train.micro_batches(step) for step in range(1, STEPS + 1)]
        parts = ["tokens", "targets"]
        parts += ["sentences.segments", "sentences.swapped"] if "sentence_order" in model else []
        arrays = {
            part.rpartition(".")[2]: torch.stack(
                [
                    torch.cat([attrgetter(part)(each).movedim(-1, 0) for each in step])
                    for step in batches
                ]
            )
            for part in parts
        }
        np.savez(folder / f"{kind}.npz", **arrays)
    hf_training.run("train", folder)
    return folder


@pytest.fixture(scope="module")
def differences(ranks: RankPool, trained: Path) -> dict[str, tuple[float, float]]:
    """Of logits and of weights, by name, once our job has trained the same."""
    for name in CONFIGS:
        _train_and_export(ranks, trained, name)
    found: dict[str, tuple[float, float]] = json.loads(hf_training.run("compare", trained))
    return found


def _train_and_export(ranks: RankPool, trained: Path, name: str) -> None:
    folder = trained / "jobs" / name
    folder.mkdir(parents=True)
    source = trained / "before" / name
    # A quarter of the rows is padding, all of it on the second tensor rank.
    section = import_folder(source, Storage(str(folder / "root")), vocab_multiple=128).section
    spec = spec_of(
        trained,
        section,
        parallel=LAYOUT,
        checkpoint={"load": str(folder / "root"), "storage_interval_steps": STEPS},
    )
    results = ranks.run(train, 4, folder, spec, 1)
    assert {result["code"] for result in results} == {WorkerExitCode.DONE}, name
    upload_all(folder, spec)
    root = Storage(str(folder / "store" / "job-1"))
    out = trained / "exported" / name
    export_folder(root, STEPS, parse_spec(spec).model, out, like=source, dtype=torch.float32)


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
