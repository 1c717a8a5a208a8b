"""Training with and without a warm-up before it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outlast.blackbox import Group, Pass, Reader, Writer
from outlast.spec.parse import parse_spec
from tests.trainer.jobs import mesh_of
from tests.trainer.ranks import RankContext
from trainer.worker.loop import TrainLoop
from trainer.worker.state import build_state
from trainer.worker.warmup import warm_up


@dataclass(frozen=True, slots=True)
class _SavesNothing:
    newest_sealed: int = -1
    upload_busy: bool = False
    is_replicated: bool = False
    newest_replicated: int = -1
    replica_busy: bool = False

    def save(self, step: int, extra: dict[str, Any], **_: object) -> bool:
        return True

    def wait_before_write(self, tensor: torch.Tensor) -> None:
        """Nothing reads it."""

    def finish(self, timeout_s: float | None = None) -> None:
        """Nothing is on its way."""


def train(
    context: RankContext, document: dict[str, Any], folder: Path, warms_up: bool
) -> dict[str, Any]:
    """Three steps: what ranks agreed on, weights, random state and bytes sent."""
    spec = parse_spec(document)
    path = folder / f"{warms_up}-{context.rank}.box"
    box = Writer(path, rank=context.rank, world_size=context.world_size, attempt=1)
    tied, folds = spec.model.tied_embeddings, spec.parallel.folds
    mesh = mesh_of(context, spec.layout, tied=tied, recorder=box, folds=folds)
    state = build_state(spec, mesh, folder / "data")
    state.flat.initialise(spec.seed)
    state.data_parallel.refresh()
    torch.manual_seed(spec.seed)
    if warms_up:
        warm_up(state, 1)
    loop = TrainLoop(state, box, _SavesNothing(), stop_requested=lambda: False)
    agreed = [asdict(loop.train_step(step)) for step in (1, 2, 3)]
    # A rank that ends while it sends takes its peers' results with it.
    state.data_parallel.drain()
    weights = hashlib.sha256()
    for part in state.flat.parts:
        weights.update(part.master.numpy().tobytes())
    reader = Reader(path)
    passes = [each for each in reader.spans() if each.work is not Pass.NONE]
    return {
        "agreed": agreed,
        "passes": [(each.work.name.lower(), each.chunk, each.micro_batch) for each in passes],
        "eval": [record.eval_loss for record in reader.new_steps()],
        "weights": weights.hexdigest(),
        "random": torch.get_rng_state().tolist(),
        "sent": {
            # Weights that ZeRO gathers before the first step are gathered for a warm-up.
            group: sent
            for group, sent in reader.step_use().sent_bytes.items()
            if group is not Group.DP
        },
    }
