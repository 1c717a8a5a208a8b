"""Groups that a benchmark makes by itself, with a black box that notes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # a re-export

from outlast.blackbox import Group, Op, OpRecord
from outlast.layout import Layout
from trainer.parallel.mesh import Mesh, build_mesh

if TYPE_CHECKING:
    from bench.member import Rank


class NoBox:
    """A black box costs a store an operation; the baselines have none."""

    def enter(
        self, op: Op, group: Group, detail: int = -1, peer: int = -1, message: int = -1
    ) -> int:
        return 0

    def leave(self, departed_ns: int = 0) -> None:
        pass

    def stands_in(self, operation: OpRecord) -> None:
        pass

    def ended(self, operation: OpRecord) -> None:
        pass


def quiet_mesh(rank: Rank, layout: Layout, *, folds: bool = False) -> Mesh:
    """The groups of `layout`; a benchmark's ranks make them once."""
    return build_mesh(
        layout,
        rank.rank,
        store=PrefixStore("quiet/", rank.store),
        device=torch.device("cpu"),
        timeout_s=300,
        recorder=NoBox(),
        tied_embeddings=False,
        folds=folds,
        gloo_interface=rank.interface,
    )
