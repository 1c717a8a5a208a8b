"""Jobs that train models of Hugging Face: in, some steps, and out. What tests of them share."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkpoint.hf.convert import import_folder
from checkpoint.hf.export import export_folder
from checkpoint.storage.storage import Storage
from outlast.spec.parse import parse_spec
from outlast.worker_contract import WorkerExitCode
from tests.checkpoint import hf_training
from tests.trainer.hf_models import SEQ_LEN, VOCAB
from tests.trainer.jobs import train
from tests.trainer.places import place_of
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import upload_all
from trainer.worker.feeding import open_data

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "masked": {"attention": "bidirectional"},
    "ordered": {"attention": "bidirectional", "segments": 2, "sentence_order": True},
}
# Of losses and weights, and of logits in parts of the largest.
TOLERANCE = 1e-5


def spec_of(
    folder: Path, model: dict[str, Any], *, sequences: int, steps: int = STEPS, **sections: Any
) -> dict[str, Any]:
    """A job on the tokens of a folder, with `sequences` in a step."""
    (beta1, beta2), tokens = hf_training.BETAS, str(folder / "tokens.npy")
    data = {"tokens": tokens, "validation_tokens": tokens, "global_batch": sequences}
    if model.get("attention") == "bidirectional":
        data["masked"] = {"fraction": 0.15, "mask_token": 7, "never": [8, 9]}
    if model.get("sentence_order"):
        data["sentence_order"] = {"cls_token": 8, "sep_token": 9}
    document = {
        "name": "job",
        "steps": steps,
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


def write_tokens(folder: Path, *, sequences: int) -> None:
    """What all jobs on a folder read: enough for four steps."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, VOCAB, 4 * sequences * SEQ_LEN + 1, dtype=np.uint16)
    np.save(folder / "tokens.npy", tokens)


def train_theirs(folder: Path, *names: str, sequences: int) -> None:
    """`transformers` trains models on what our jobs will read: of some names, or all."""
    write_tokens(folder, sequences=sequences)
    mesh = place_of()
    for kind, model in KINDS.items():
        spec = parse_spec(spec_of(folder, {"vocab_size": VOCAB, **model}, sequences=sequences))
        data = open_data(spec, mesh, folder)
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
    hf_training.run("train", folder, *names)


def train_and_export(
    ranks: RankPool, folder: Path, run: str, parallel: dict[str, Any], *, sequences: int
) -> Path:
    """Our job trains the same model on some layout and exports it; the folder of the job.

    `run` is the name of the model, and after an @ that of the run where there are several.
    """
    job = folder / "jobs" / run
    job.mkdir(parents=True)
    source = folder / "before" / hf_training.model_of(run)
    # A quarter of the rows is padding, all of it on the second tensor rank.
    section = import_folder(source, Storage(str(job / "root")), vocab_multiple=128).section
    spec = spec_of(
        folder,
        section,
        sequences=sequences,
        parallel={**parallel, "micro_batch": hf_training.MICRO_BATCH},
        checkpoint={"load": str(job / "root"), "storage_interval_steps": STEPS},
    )
    results = ranks.run(train, parse_spec(spec).layout.world_size, job, spec, 1)
    assert {result["code"] for result in results} == {WorkerExitCode.DONE}, run
    upload_all(job, spec)
    root, out = Storage(str(job / "store" / "job-1")), folder / "exported" / run
    export_folder(root, STEPS, parse_spec(spec).model, out, like=source, dtype=torch.float32)
    return job
