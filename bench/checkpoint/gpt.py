"""What is saved: the state of a GPT under Adam, as the trainer itself holds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # re-exports

from bench.member import Rank
from bench.trainer.quiet import NoBox
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.worker.state import TrainState, build_state

# Tiled over all tensors: drawing 4 GB of noise would take longer than the measurement.
_NOISE_NUMBERS = 1 << 22
# More than any benchmark runs.
STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A GPT's shape, named by the bytes of its weights and both moments, in fp32.

    Of a large one, three slots and torch's copies do not fit into 24 GiB together.
    """

    name: str
    layers: int
    hidden: int
    vocab_size: int = 50304
    seq_len: int = 128
    is_large: bool = False

    @property
    def nbytes(self) -> int:
        """About what a checkpoint has."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        outside = (self.vocab_size + self.seq_len + 2) * self.hidden
        return 12 * (self.layers * block + outside)

    def spec(self, *, dp: int = 1) -> JobSpec:
        """A job that trains it on replicas, and leaves it to others when to save."""
        return parse_spec(
            {
                "name": "bench-checkpoint",
                "steps": STEPS,
                "model": {
                    "layers": self.layers,
                    "hidden": self.hidden,
                    "heads": max(1, self.hidden // 64),
                    "seq_len": self.seq_len,
                    "vocab_size": self.vocab_size,
                },
                "parallel": {"dp": dp, "micro_batch": 1},
                "data": {"global_batch": dp, "max_bytes": 2**20},
                "checkpoint": {"memory_interval_steps": STEPS, "storage_interval_steps": STEPS},
                "eval": {"interval_steps": None},
            }
        )


SMALL = Size(name="small", layers=2, hidden=64, vocab_size=256, seq_len=16)
# Of parameters there are 89 and 355 million.
SIZES = {
    "1": Size(name="1 GB", layers=20, hidden=512),
    "4": Size(name="4 GB", layers=24, hidden=1024, is_large=True),
}
S3_SIZE = Size(name="0.25 GB", layers=8, hidden=384, vocab_size=16384)


def mesh_of(rank: Rank, spec: JobSpec) -> Mesh:
    """The groups of a job of so many replicas."""
    return build_mesh(
        spec.layout,
        rank.rank,
        store=own_store(rank),
        device=torch.device("cpu"),
        timeout_s=600,
        recorder=NoBox(),
        tied_embeddings=spec.model.tied_embeddings,
        folds=spec.parallel.folds,
        gloo_interface=rank.interface,
    )


def own_store(rank: Rank) -> Store | None:
    """Where the trainer's ranks find each other; a rank alone needs none."""
    return PrefixStore("ours/", rank.store) if rank.world_size > 1 else None


def noisy_state(spec: JobSpec, mesh: Mesh, data_dir: Path) -> TrainState:
    """A state like that of training in full run.

    Moments that are zero would be pages that do not exist yet, which copy at the speed
    of the cache.
    """
    state = build_state(spec, mesh, data_dir)
    generator = torch.Generator().manual_seed(spec.seed)
    noise = torch.empty(_NOISE_NUMBERS).normal_(0.0, 0.02, generator=generator)
    for named in state.named_tensors():
        flat = named.tensor.view(-1)
        for start in range(0, flat.numel(), noise.numel()):
            piece = flat[start : start + noise.numel()]
            piece.copy_(noise[: piece.numel()])
            if named.name.endswith("exp_avg_sq"):
                piece.square_()
    return state
