"""The groups of the 3D layout that one rank belongs to.

Each rank builds its own few groups from the layout, in one pass: no rank
creates groups that it is not in, and there is no barrier per group. There is no
world group: what all ranks must agree on is folded over tp, then dp, then pp, which
needs no connection that training does not need anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # re-exports

from outlast.blackbox import Group
from outlast.layout import Coordinate, Layout
from trainer.parallel.comm import BackendComm, Comm, Recorder
from trainer.parallel.gloo import GlooComm
from trainer.parallel.gloo_network import GlooNetwork
from trainer.parallel.nccl import NcclComm, abort
from trainer.parallel.timeline import HostTimeline, Timeline, timeline_of
from trainer.parallel.weight_gradients import WeightGradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A rank's place in the layout and its groups.

    `pp_back` carries what flows from later stages to earlier ones. On NCCL it is
    a group of its own, because messages between two ranks keep their order per
    group; with gloo's tags it is `pp` itself. `embedding` joins the first and
    last stage when each has a copy of tied embeddings. `folds`: the pipeline comes back, and both
    ends of the model are on its first stage. `ep` joins replicas that divide experts among
    them, `expert_dp` those that hold the same ones: all of `dp` without such. `cp` joins the ranks
    of `dp` that divide sequences among them. `timeline` tells when the rank's work is done.
    `weight_gradients` is where its linear layers and its pipeline engine meet, should that split
    backward passes.
    """

    layout: Layout
    rank: int
    at: Coordinate
    device: torch.device
    tp: Comm
    dp: Comm
    pp: Comm
    pp_back: Comm
    embedding: Comm
    ep: Comm
    expert_dp: Comm
    cp: Comm
    joined: tuple[tuple[str, BackendComm], ...] = ()
    """Those with other members, in the order in which they connect, with their names."""
    timeline: Timeline = field(default_factory=HostTimeline)
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    folds: bool = False

    @property
    def replica(self) -> int:
        """Whose samples this rank reads."""
        return self.at.dp // self.layout.cp

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def has_loss(self) -> bool:
        """Whether the model ends on this stage."""
        return self.at.pp == (0 if self.folds else self.layout.pp - 1)

    @property
    def comms(self) -> dict[Group, tuple[Comm, ...]]:
        """Everything that sends, by the kind of its group."""
        pipeline = (self.pp,) if self.pp_back is self.pp else (self.pp, self.pp_back)
        return {
            Group.TP: (self.tp,),
            Group.DP: (self.dp,),
            Group.PP: pipeline,
            Group.EMBEDDING: (self.embedding,),
            **({} if self.cp.size == 1 else {Group.CP: (self.cp,)}),
            **({} if self.ep.size == 1 else self._expert_comms),
        }

    @property
    def _expert_comms(self) -> dict[Group, tuple[Comm, ...]]:
        return {Group.EP: (self.ep,), Group.EXPERT_DP: (self.expert_dp,)}

    def abort(self) -> None:
        """End what a device waits for with other ranks; its groups are of no use then.

        On a CPU nothing is done: there an operation fails as its connections end.
        """
        abort(comm for _, comm in self.joined)

    def disconnect(self) -> None:
        """Let go of all groups' backends, until `rejoin`."""
        # What waits for a device's moments has parts in what was under way.
        self.timeline.forget()
        for _, comm in self.joined:
            comm.disconnect()

    def fold(self, row: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """`row` of every rank, combined over tp, then dp, then pp.

        `combine` reduces [k, n] to [n]; every rank computes the same result from
        the same rows in the same order.
        """
        for comm in (self.tp, self.dp, self.pp):
            if comm.size > 1:
                row = combine(comm.all_gather(row.unsqueeze(0)))
        return row

    def from_rank_0(self, row: Tensor) -> Tensor:
        """Rank 0's `row`, on every rank."""
        return self.fold(row, lambda rows: rows[0])


def build_mesh(
    layout: Layout,
    rank: int,
    *,
    store: Store | None,
    device: torch.device,
    timeout_s: float,
    recorder: Recorder,
    tied_embeddings: bool,
    folds: bool = False,
    gloo_interface: str = "",
) -> Mesh:
    """Join this rank's groups; returns once all their members are connected.

    `store` is the rendezvous of this attempt; a world of one needs none. Rank 0 serves it, and
    must keep it until the last rank has joined: others may be behind.
    `gloo_interface` is the network interface for gloo, "" for the host's default.
    """
    timeline = timeline_of(device)
    timeout = timedelta(seconds=timeout_s)
    joiner = _Joiner(
        rank, store, device, timeout, recorder, timeline, gloo_interface=gloo_interface
    )
    tp = joiner.join(Group.TP, layout.group_of("tp", rank))
    dp = joiner.join(Group.DP, layout.group_of("dp", rank))
    pipeline = layout.group_of("pp", rank)
    pp = joiner.join(Group.PP, pipeline)
    pp_back = joiner.join(Group.PP, pipeline, name="back") if device.type == "cuda" else pp
    has_copies = tied_embeddings and layout.pp > 1 and not folds
    ends = (pipeline[0], pipeline[-1]) if has_copies else (rank,)
    embedding = joiner.join(Group.EMBEDDING, ends if rank in ends else (rank,))
    return Mesh(
        layout=layout,
        rank=rank,
        at=layout.coordinate(rank),
        device=device,
        tp=tp,
        dp=dp,
        pp=pp,
        pp_back=pp_back,
        embedding=embedding,
        ep=joiner.join(Group.EP, layout.group_of("ep", rank)),
        expert_dp=dp if layout.ep == 1 else joiner.join_holders(layout),
        cp=joiner.join(Group.CP, layout.group_of("cp", rank)),
        joined=tuple(joiner.joined),
        timeline=timeline,
        folds=folds,
    )


def rejoin(
    mesh: Mesh,
    *,
    store: Store | None,
    timeout_s: float,
    recorder: Recorder,
    gloo_interface: str = "",
) -> None:
    """Connect the groups of a mesh anew, for another attempt of the same layout.

    Others may build theirs meanwhile. The parameters are as in `build_mesh`.
    """
    timeout = timedelta(seconds=timeout_s)
    joiner = _Joiner(
        mesh.rank,
        store,
        mesh.device,
        timeout,
        recorder,
        mesh.timeline,
        gloo_interface=gloo_interface,
    )
    for name, comm in mesh.joined:
        comm.connect(joiner.backend(name, comm.index, comm.size), recorder)


class _Joiner:
    """Makes a rank's groups, on the backend of its device."""

    def __init__(
        self,
        rank: int,
        store: Store | None,
        device: torch.device,
        timeout: timedelta,
        recorder: Recorder,
        timeline: Timeline,
        *,
        gloo_interface: str,
    ) -> None:
        self._rank = rank
        self._store = store
        self._timeout = timeout
        self._recorder = recorder
        self._timeline = timeline
        self.joined: list[tuple[str, BackendComm]] = []
        self._network: GlooNetwork | None = None
        if device.type != "cuda" and store is not None:
            self._network = GlooNetwork(store, timeout=timeout, interface=gloo_interface)

    def join_holders(self, layout: Layout) -> Comm:
        """The ranks that hold the same experts."""
        return self.join(Group.EXPERT_DP, layout.group_of("expert_dp", self._rank))

    def join(self, group: Group, ranks: tuple[int, ...], *, name: str = "") -> Comm:
        index = ranks.index(self._rank)
        if len(ranks) == 1:
            return Comm(group=group, ranks=ranks, index=index)
        name = f"{group.name.lower()}{name}-{ranks[0]}-{ranks[-1]}"
        kind = NcclComm if self._network is None else GlooComm
        comm = kind(
            self.backend(name, index, len(ranks)),
            group=group,
            ranks=ranks,
            index=index,
            recorder=self._recorder,
            timeline=self._timeline,
        )
        self.joined.append((name, comm))
        return comm

    def backend(self, name: str, index: int, size: int) -> Any:
        """That of the group which its members call so."""
        if self._store is None:
            raise ValueError(f"the group {name} of {size} needs a rendezvous store")
        if self._network is not None:
            return self._network.join(name, index, size)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        store = PrefixStore(f"{name}/", self._store)
        return dist.ProcessGroupNCCL(store, index, size, options)
