"""What is done before a pipeline's first receive, and that nothing of it remains.

On CUDA only does it have a purpose; here the same code runs over gloo.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.layout import Layout
from outlast.spec.models import JobSpec
from outlast.spec.parse import parse_spec
from tests.trainer.jobs_warmup import train
from tests.trainer.ranks import RankPool
from trainer.parallel.mesh import Mesh
from trainer.worker.device import cuda_environment
from trainer.worker.warmup import is_needed

LAYOUTS: dict[str, dict[str, Any]] = {
    "dropout": {
        "parallel": {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"},
        "model": {"dropout": 0.1, "attention_dropout": 0.1},
    },
    "whole_sequence": {"parallel": {"pp": 2, "tp": 2, "sequence_parallel": False}},
    "zero_3": {"parallel": {"pp": 2, "dp": 2, "zero": {"level": 3}}, "precision": "bf16"},
    "zero_2": {
        "parallel": {"pp": 2, "dp": 2, "zero": {"level": 2, "reduce_after": "micro_batch"}},
    },
    "fp16": {"parallel": {"pp": 2}, "precision": "fp16", "loss_scale": {"initial": 1024.0}},
}


@pytest.mark.parametrize("sections", LAYOUTS.values(), ids=list(LAYOUTS))
def test_training_is_the_same_after_a_warm_up(
    ranks: RankPool, tmp_path: Path, sections: dict[str, Any]
) -> None:
    """The same bits, and nothing of it in the first step's account."""
    model = {"layers": 4, "hidden": 32, "heads": 4, "seq_len": 16, "vocab_size": 256}
    document = {
        "name": "warmed-up",
        "steps": 3,
        "data": {"global_batch": 8, "max_bytes": 2**16},
        "eval": {"interval_steps": 2, "batches": 1},
        **sections,
        "model": {**model, **sections.get("model", {})},
    }
    world_size = parse_spec(document).layout.world_size
    without = ranks.run(train, world_size, document, tmp_path, False)
    assert ranks.run(train, world_size, document, tmp_path, True) == without
    assert without[0]["eval"][1] is not None
    # Every micro-batch of every step once forward and once backward, through each chunk.
    assert passes_of(without[0]) == expected_passes(parse_spec(document))


def passes_of(found: dict[str, Any]) -> Counter[tuple[str, int, int]]:
    return Counter(found["passes"])


def expected_passes(spec: JobSpec) -> Counter[tuple[str, int, int]]:
    return Counter(
        {
            (name, chunk, micro_batch): spec.steps
            for name in ("forward", "backward")
            for chunk in range(spec.parallel.virtual_stages)
            for micro_batch in range(spec.num_micro_batches)
        }
    )


def test_only_a_pipeline_on_cuda_needs_one() -> None:
    assert not is_needed(_mesh(Layout(pp=2), "cpu"))
    assert not is_needed(_mesh(Layout(dp=2), "cuda"))
    assert is_needed(_mesh(Layout(pp=2), "cuda"))


def _mesh(layout: Layout, device: str) -> Mesh:
    nobody: Any = None
    at = layout.coordinate(0)
    named = dict.fromkeys(
        ("tp", "dp", "pp", "pp_back", "embedding", "ep", "expert_dp", "cp"), nobody
    )
    return Mesh(layout=layout, rank=0, at=at, device=torch.device(device), **named)


def test_what_cuda_is_told_follows_from_the_job() -> None:
    assert cuda_environment(bitwise=False, pipelined=False, lives_on=False).keys() == {
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_MAX_CONNECTIONS",
    }
    found = cuda_environment(bitwise=True, pipelined=True, lives_on=True)
    assert found["CUDA_MODULE_LOADING"] == "EAGER"
    assert found["TORCHINDUCTOR_DETERMINISTIC"] == "1"
    # torch's own threads leave it to the rank to end what has failed.
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
