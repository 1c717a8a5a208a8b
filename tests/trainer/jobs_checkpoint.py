"""Ranks that train and show the state that a checkpoint should hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.trainer.jobs import worked
from tests.trainer.ranks import RankContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One rectangle of one rank's state."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    owned: bool
    values: np.ndarray[Any, Any]


def train_and_show(context: RankContext, folder: Path, spec: dict[str, Any]) -> list[Shown]:
    """Train to the end; everything that the rank then holds."""
    code, [state] = worked(context, folder, spec, 1)
    assert code == 0, (folder / f"a1-rank-{context.rank}.log").read_text()
    return [
        Shown(
            name=named.name,
            global_shape=named.global_shape,
            offsets=named.offsets,
            owned=named.owned,
            values=named.tensor.detach().numpy().copy(),
        )
        for named in state.named_tensors()
    ]
