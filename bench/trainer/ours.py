"""One rank of Outlast's trainer, as a benchmark drives it: the production loop.

It has no checkpoints unless it is given a folder for those in host memory.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # re-exports

from bench.trainer.shape import Shape
from checkpoint.stage.copy_stream import copy_stream_for
from checkpoint.stage.stager import Stager
from outlast.blackbox import Reader, Writer
from outlast.spec import JobSpec
from trainer.parallel.mesh import build_mesh
from trainer.worker.loop import TrainLoop
from trainer.worker.state import TrainState, build_state

if TYPE_CHECKING:
    from bench.member import Rank

# More than any benchmark runs.
STEPS = 100_000


class _SavesNothing:
    """Stage 1 of a checkpoint is measured elsewhere; the baseline saves nothing either."""

    newest_sealed = -1
    upload_busy = False
    is_replicated = False
    newest_replicated = -1
    replica_busy = False

    def save(self, step: int, extra: dict[str, Any], **_: object) -> bool:
        return True

    def wait_before_write(self, tensor: torch.Tensor) -> None:
        """Nothing reads it."""

    def finish(self, timeout_s: float | None = None) -> None:
        """Nothing is on its way."""


def _stager(folder: Path, state: TrainState) -> Stager:
    """As a worker has it that is alone on its node."""
    return Stager(
        folder,
        rank=state.mesh.rank,
        attempt=1,
        world_size=state.mesh.layout.world_size,
        tensors=state.named_tensors(),
        copy_stream=copy_stream_for(state.mesh.device, ranks_here=1),
    )


class Ours:
    """`step` trains on one global batch; `box` reads what the rank notes of itself."""

    @classmethod
    def on(cls, rank: Rank, shape: Shape) -> Ours:
        """The trainer on a rank of the benchmark."""
        store = PrefixStore(f"ours-{shape.document()}/", rank.store)
        return cls(
            shape.spec(steps=STEPS),
            rank=rank.rank,
            store=store if rank.world_size > 1 else None,
            folder=rank.folder,
            interface=rank.interface,
        )

    def __init__(
        self,
        spec: JobSpec,
        *,
        rank: int = 0,
        store: Store | None = None,
        folder: Path,
        interface: str = "",
        device: torch.device | None = None,
        memory: Path | None = None,
    ) -> None:
        path = folder / f"{rank}.blackbox"
        box = Writer(path, rank=rank, world_size=spec.layout.world_size, attempt=1)
        self.box = Reader(path)
        self.mesh = build_mesh(
            spec.layout,
            rank,
            store=store,
            device=device or torch.device("cpu"),
            timeout_s=600,
            recorder=box,
            tied_embeddings=spec.model.tied_embeddings,
            folds=spec.parallel.folds,
            gloo_interface=interface,
        )
        state = build_state(spec, self.mesh, folder / "data")
        state.flat.initialise(spec.seed)
        state.data_parallel.refresh()
        self.state_bytes = sum(named.tensor.nbytes for named in state.named_tensors())
        self.num_parameters = sum(math.prod(facts.shape) for facts in state.flat.facts.values())
        self.stager = None if memory is None else _stager(memory, state)
        saver = self.stager or _SavesNothing()
        self._loop = TrainLoop(state, box, saver, stop_requested=lambda: False)
        self._step = 0

    @property
    def bytes_sent(self) -> int:
        """To the tensor and pipeline groups, so far."""
        return self.mesh.tp.bytes_sent + self.mesh.pp.bytes_sent

    def step(self, number: int) -> None:
        """Forward, backward and update on the next batch."""
        self._step += 1
        self._loop.train_step(self._step)
