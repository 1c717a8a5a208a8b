"""What brings a saved state back into a rank, wherever it lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from checkpoint.core.manifest import Manifest
from checkpoint.restore import restore
from checkpoint.restore.peers import Peers
from checkpoint.restore.restore import Node, SealedStep
from checkpoint.stage.payload import NamedTensor
from checkpoint.storage.storage import Storage


class Ranks(Protocol):
    """All ranks of an attempt, which agree on a few numbers; the trainer's mesh is one."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def fold(self, row: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """`row` of every rank, combined: `combine` makes [k, n] into [n]."""
        ...


class Loader(Protocol):
    """Brings a state back; raises what the functions of `checkpoint.restore.restore` raise."""

    def sealed_steps(self, folder: Path) -> list[SealedStep]:
        """What host memory holds whole for this rank, newest first."""
        ...

    def load_memory(self, folder: Path, sealed: SealedStep) -> dict[str, Any]:
        """Load a sealed step; returns what was saved as `extra`."""
        ...

    def load_storage(
        self,
        storage: Storage,
        step: int,
        peers: Peers,
        *,
        node: Node | None,
        manifest_of: Callable[[int], Manifest],
    ) -> dict[str, Any]:
        """Load a committed step together with all ranks; returns what was saved as `extra`."""
        ...


@dataclass(slots=True)
class InPlace:
    """Into tensors that are there, whatever is in them.

    With `weights_only` what storage has of an optimizer is left there. `present` is the step in
    host memory that the tensors hold as they are, if they do, until something is loaded.
    """

    tensors: Sequence[NamedTensor]
    weights_only: bool = False
    present: SealedStep | None = None

    def sealed_steps(self, folder: Path) -> list[SealedStep]:
        return restore.sealed_steps(folder, self.tensors)

    def load_memory(self, folder: Path, sealed: SealedStep) -> dict[str, Any]:
        copies = sealed != self.present
        if copies:
            self.present = None
        return restore.load_memory(folder, sealed, self.tensors, copies=copies)

    def load_storage(
        self,
        storage: Storage,
        step: int,
        peers: Peers,
        *,
        node: Node | None,
        manifest_of: Callable[[int], Manifest],
    ) -> dict[str, Any]:
        self.present = None
        return restore.load_storage(
            storage,
            step,
            self.tensors,
            peers,
            node=node,
            manifest_of=manifest_of,
            weights_only=self.weights_only,
        )
