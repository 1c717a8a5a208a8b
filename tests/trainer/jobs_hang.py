"""Ranks that hang, with real operations and real black boxes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from outlast.blackbox import Phase, Reader, Writer
from outlast.layout import Layout
from tests.trainer.ranks import RankContext
from trainer.parallel.mesh import Mesh, build_mesh

SQUARE = Layout(tp=2, dp=2)
PAIR = Layout(dp=2)
# How long ranks stand in their operation before it gives up, so that the test ends.
GIVES_UP_S = 8.0


def swapped_groups(context: RankContext, folder: str) -> dict[str, object]:
    """Ranks 1 and 2 reduce over dp before tp, the others the other way round."""

    def swapped(mesh: Mesh) -> None:
        groups = (mesh.dp, mesh.tp) if context.rank in (1, 2) else (mesh.tp, mesh.dp)
        for comm in groups:
            comm.all_reduce(torch.ones(1))

    return _stuck(context, folder, SQUARE, swapped)


def swapped_roots(context: RankContext, folder: str) -> dict[str, object]:
    """Two broadcasts, from rank 0 and from rank 1, in another order on each of both."""

    def swapped(mesh: Mesh) -> None:
        for root in (1, 0) if context.rank == 0 else (0, 1):
            mesh.dp.broadcast(torch.ones(1), root)

    return _stuck(context, folder, PAIR, swapped)


def _stuck(
    context: RankContext, folder: str, layout: Layout, hang: Callable[[Mesh], None]
) -> dict[str, object]:
    """What the rank's box says once its operation has given up."""
    path = Path(folder) / f"rank-{context.rank}.blackbox"
    box = Writer(path, rank=context.rank, world_size=layout.world_size, attempt=1)
    mesh = build_mesh(
        layout,
        context.rank,
        store=context.store(),
        device=torch.device("cpu"),
        timeout_s=GIVES_UP_S,
        recorder=box,
        tied_embeddings=True,
        gloo_interface="lo",
    )
    box.phase(Phase.GRADIENT_SYNC)
    # In step first: connections are made, and every counter is past zero.
    for comm in (mesh.tp, mesh.dp):
        comm.all_reduce(torch.ones(1))
    try:
        hang(mesh)
    except Exception as error:  # noqa: BLE001  # whatever says that it gave up
        problem = type(error).__name__
    else:
        problem = "none"
    present = Reader(path).present()
    return {
        "problem": problem,
        "phase": present.phase.name.lower(),
        "last_op": str(present.last_operation or ""),
        "entered": {group.name.lower(): seq for group, seq in present.entered.items()},
    }
