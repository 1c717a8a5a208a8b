"""More tensor ranks than key/value heads: the same training, and the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoint.storage.storage import Storage
from outlast.spec.parse import parse_spec
from outlast.worker_contract import WorkerExitCode
from tests.trainer.jobs import train
from tests.trainer.ranks import RankPool
from tests.trainer.resuming import make_text, spec_of, steps_of, train_and_upload

MODEL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 1, "seq_len": 16}
PARALLEL_BLOCK = {"block": "parallel", "activation": "swiglu"}
STEPS = 4
SHARED = {
    "serial": ({}, "adamw", {"tp": 4}),
    "two_for_each": ({"kv_heads": 2, "qkv_bias": False}, "adamw", {"tp": 4}),
    "whole_sequence": ({}, "adamw", {"tp": 2, "sequence_parallel": False}),
    "parallel_block": (PARALLEL_BLOCK, "adamw", {"tp": 4}),
    "two_norms": ({"block": "parallel", "block_norms": 2}, "adamw", {"tp": 2}),
    "lamb": (PARALLEL_BLOCK, "lamb", {"tp": 2}),
    "replicas": ({}, "lamb", {"tp": 2, "dp": 2, "zero": {"level": 3}}),
    "recomputed": (PARALLEL_BLOCK, "adamw", {"tp": 2, "recompute": "full"}),
}


def job(
    folder: Path, model: dict[str, Any], optimizer: str, parallel: dict[str, Any], **checkpoint: Any
) -> dict[str, Any]:
    return spec_of(
        folder,
        steps=STEPS,
        precision="fp64",
        model=MODEL | model,
        parallel=parallel,
        optimizer={"name": optimizer, "lr": 0.01},
        eval={"interval_steps": None},
        checkpoint={"storage_interval_steps": 2, **checkpoint},
    )


def run(ranks: RankPool, folder: Path, spec: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    folder.mkdir()
    world_size = parse_spec(spec).layout.world_size
    results = ranks.run(train, world_size, folder, spec, 1)
    assert {result["code"] for result in results} == {WorkerExitCode.DONE}
    return [(each.loss, each.grad_norm) for each in steps_of(folder, 1, world_size - 1)]


@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_a_head_train_as_one(ranks: RankPool, tmp_path: Path, name: str) -> None:
    model, optimizer, parallel = SHARED[name]
    make_text(tmp_path)
    dense = run(ranks, tmp_path / "dense", job(tmp_path, model, optimizer, {}))
    shared = run(ranks, tmp_path / "shared", job(tmp_path, model, optimizer, parallel))
    assert [numbers for step in shared for numbers in step] == pytest.approx(
        [numbers for step in dense for numbers in step], rel=1e-9
    )

    # What they save is one tensor, which any layout goes on from.
    half, rest = tmp_path / "half", tmp_path / "rest"
    half.mkdir()
    spec = job(tmp_path, model, optimizer, parallel)
    train_and_upload(ranks, half, spec, attempt=1, stop_after=2)
    root = half / "store" / "job-1"
    saved = Storage(str(root)).read_commit(2)[1].tensors
    assert not [each for each in saved if "_kv" in each or "_mlp" in each]
    found = run(ranks, rest, job(tmp_path, model, optimizer, {}, load=str(root)))
    assert [numbers for step in found for numbers in step] == pytest.approx(
        [numbers for step in dense[2:] for numbers in step], rel=1e-9
    )
