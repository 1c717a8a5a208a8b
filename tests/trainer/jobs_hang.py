"""Ranks that hang, with real operations and real black boxes."""

from __future__ import annotations

from pathlib import Path

import torch

from outlast.blackbox import Phase, Reader, Writer
from outlast.layout import Layout
from tests.trainer.ranks import RankContext
from trainer.parallel.mesh import build_mesh

SQUARE = Layout(tp=2, dp=2)
# How long ranks stand in their operation before it gives up, so that the test ends.
GIVES_UP_S = 2.0


def swapped_groups(context: RankContext, folder: str) -> dict[str, object]:
    """Ranks 1 and 2 reduce over dp before tp, the others the other way round.

    What the rank's box says once its operation has given up.
    """
    path = Path(folder) / f"rank-{context.rank}.blackbox"
    box = Writer(path, rank=context.rank, world_size=4, attempt=1)
    mesh = build_mesh(
        SQUARE,
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
    groups = (mesh.dp, mesh.tp) if context.rank in (1, 2) else (mesh.tp, mesh.dp)
    try:
        for comm in groups:
            comm.all_reduce(torch.ones(1))
    except Exception as error:  # noqa: BLE001  # whatever says that it gave up
        problem = type(error).__name__
    else:
        problem = "none"
    present = Reader(path).present()
    return {
        "problem": problem,
        "phase": present.phase.name.lower(),
        "last_op": present.last_op,
        "entered": {group.name.lower(): seq for group, seq in present.entered.items()},
    }
