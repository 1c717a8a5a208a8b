"""What tests of resumed runs share: a job, its runs, and what they left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpoint.core.retention import RetentionPolicy
from checkpoint.upload.commit import CommitRules
from checkpoint.upload.uploader import Uploader
from outlast.blackbox import Reader, StepRecord
from outlast.spec.parse import parse_spec
from tests.trainer.jobs import train
from tests.trainer.ranks import RankPool


def make_text(folder: Path) -> None:
    """The text that all these jobs read."""
    words = [f"step {n} of {n * n}; " for n in range(1500)]
    (folder / "text.txt").write_text("".join(words))


def spec_of(folder: Path, *, steps: int, **sections: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": "job",
        "steps": steps,
        "model": {"layers": 2, "hidden": 16, "heads": 2, "seq_len": 16},
        "data": {"source": str(folder / "text.txt"), "global_batch": 4},
        "optimizer": {"lr": 0.01},
        "eval": {"interval_steps": 10, "batches": 1},
        "checkpoint": {"storage_interval_steps": 4},
    }
    document |= sections
    return parse_spec(document).model_dump(mode="json")


def steps_of(folder: Path, attempt: int, rank: int) -> list[StepRecord]:
    reader = Reader(folder / f"a{attempt}-rank-{rank}.blackbox")
    records = reader.new_steps()
    reader.close()
    return records


def curve(records: list[StepRecord]) -> list[tuple[int, float, float, float | None]]:
    """What must not depend on when a run was interrupted."""
    return [(r.step, r.loss, r.grad_norm, r.eval_loss) for r in records]


def log_of(folder: Path, attempt: int, rank: int = 0) -> str:
    return (folder / f"a{attempt}-rank-{rank}.log").read_text()


def train_and_upload(
    ranks: RankPool, folder: Path, spec: dict[str, Any], *, attempt: int, stop_after: int
) -> None:
    """Some steps, and the uploads that they asked for."""
    ranks.run(train, parse_spec(spec).layout.world_size, folder, spec, attempt, stop_after)
    upload_all(folder, spec)


def upload_all(folder: Path, spec: dict[str, Any]) -> None:
    """Bring to storage what ranks have asked for."""
    layout = parse_spec(spec).layout
    troubles: list[str] = []
    uploader = Uploader(
        str(folder / "store" / "job-1"),
        "job-1",
        folder / "memory" / "job-1",
        range(layout.world_size),
        range(layout.world_size),
        True,
        CommitRules(retention=RetentionPolicy(keep=3), timeout_s=30.0, interval_steps=1),
        lambda _: None,
        lambda _, stage, detail: troubles.append(f"{stage}: {detail}"),
    )
    uploader.start()
    try:
        assert uploader.drain(30.0)
    finally:
        uploader.stop()
    assert troubles == []


def dense_of(ranks: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """Whole tensors put together from what all ranks hold; replicas must hold the same bits."""
    whole: dict[str, NDArray[Any]] = {}
    seen: dict[str, NDArray[Any]] = {}
    for rank in ranks:
        for name, global_shape, offsets, values in rank["tensors"]:
            dense = whole.setdefault(name, np.zeros(global_shape, values.dtype))
            known = seen.setdefault(name, np.zeros(global_shape, bool))
            pairs = zip(offsets, values.shape, strict=True)
            place = tuple(slice(first, first + size) for first, size in pairs)
            assert np.array_equal(dense[place][known[place]], values[known[place]])
            dense[place], known[place] = values, True
    assert all(known.all() for known in seen.values())
    return whole
