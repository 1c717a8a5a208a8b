"""What a rank of a job would stage, built without the other ranks."""

from __future__ import annotations

from typing import Any

import torch

from checkpoint.stage.payload import NamedTensor
from outlast.blackbox import Group
from outlast.spec import JobSpec
from trainer.model.parameters import FlatParameters
from trainer.parallel.comm import Comm
from trainer.parallel.mesh import Mesh
from trainer.worker import configure
from trainer.worker.body import build_chunks, sharding_of
from trainer.worker.state import TrainState


def staged_tensors(spec: JobSpec, rank: int) -> list[NamedTensor]:
    """The tensors that a rank gives its stager, in order; their values are nothing."""
    mesh = _mesh(spec, rank)
    flat = FlatParameters(
        build_chunks(spec, configure.gpt_config(spec), mesh),
        tp_size=mesh.tp.size,
        sharding=sharding_of(mesh, spec.parallel.zero.level),
    )
    # Of all that a rank trains with, only these decide what it stages.
    others = dict.fromkeys(TrainState.__dataclass_fields__)
    others |= {
        "spec": spec,
        "mesh": mesh,
        "flat": flat,
        "optimizer": configure.optimizer(spec, flat, mesh),
    }
    known: Any = others
    return TrainState(**known).named_tensors()


def _mesh(spec: JobSpec, rank: int) -> Mesh:
    """A rank's place, in groups that nothing is sent in."""
    layout = spec.layout

    def comm(group: Group, ranks: tuple[int, ...]) -> Comm:
        return Comm(group=group, ranks=ranks, index=ranks.index(rank))

    pipeline = layout.group_of("pp", rank)
    ends = (pipeline[0], pipeline[-1])
    joined = ends if spec.model.tied_embeddings and layout.pp > 1 and rank in ends else (rank,)
    pp = comm(Group.PP, pipeline)
    return Mesh(
        layout=layout,
        rank=rank,
        at=layout.coordinate(rank),
        device=torch.device("cpu"),
        tp=comm(Group.TP, layout.group_of("tp", rank)),
        dp=comm(Group.DP, layout.group_of("dp", rank)),
        pp=pp,
        pp_back=pp,
        embedding=comm(Group.EMBEDDING, joined),
        ep=comm(Group.EP, layout.group_of("ep", rank)),
        expert_dp=comm(Group.EXPERT_DP, layout.group_of("expert_dp", rank)),
        cp=comm(Group.CP, layout.group_of("cp", rank)),
    )
