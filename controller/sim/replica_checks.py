"""Invariant 7 of copies in the host memory of other nodes.

A job goes on from its copies, with no more steps lost than a copy takes, unless it loses a node
together with those that keep its copies.
What a rank restores from them is its own, and of an attempt that no later one has left behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from controller.sim.attempt import Training
from controller.sim.host_memory import Kept, Part
from controller.sim.violation import Violation
from outlast.ids import JobId, NodeId
from outlast.skipped import is_undone

if TYPE_CHECKING:
    from controller.sim.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class _Promise:
    """To where a job comes back that loses some of these nodes, and none that keep their copies."""

    step: int
    world_size: int
    # By place, and how often the memory of each was lost by then.
    nodes: tuple[NodeId, ...]
    num_lost: tuple[int, ...]


class ReplicaChecks:
    """Of all jobs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._promises: dict[JobId, _Promise] = {}
        # Attempts whose copies have arrived, and the step that each resumed from.
        self._resumed: dict[JobId, list[tuple[int, int]]] = {}

    def check_peers(
        self, training: Training, known_peers: Mapping[NodeId, Mapping[NodeId, object]]
    ) -> None:
        """Each node knows where the agents are that keep the copies of its ranks."""
        assert training.placement is not None
        for rank, holder in enumerate(training.placement.holders):
            node = training.rank_nodes[rank]
            if holder == node:
                self._fail(training, f"{node} keeps the copies of its own rank {rank}")
            if holder is not None and NodeId(holder) not in known_peers[node]:
                self._fail(training, f"{node} does not know where copies of rank {rank} go")

    def sealed(self, training: Training, kept: Kept, done: int) -> None:
        """An attempt has stopped after this step."""
        job = training.job
        self._promises.pop(job.job_id, None)
        if not kept.copied:
            return
        step = kept.copied[-1]
        # A copy that was just about to arrive, and the one before it.
        if not job.read_share and done - step > 2 * job.copy_steps:
            self._fail(training, f"its newest copies are {done - step} steps old")
        self._resumed.setdefault(job.job_id, []).append((training.attempt, training.resumed))
        self._promises[job.job_id] = _Promise(
            step=step,
            world_size=training.world_size,
            nodes=training.nodes,
            num_lost=self._num_lost(training),
        )

    def resumed(self, training: Training) -> None:
        """An attempt trains: if it is one node that was lost, from the newest copies."""
        promise = self._promises.get(training.job.job_id)
        if promise is None or promise.step <= training.resumed:
            return
        del self._promises[training.job.job_id]
        if promise.world_size != training.world_size or not training.is_copied:
            return
        pairs = zip(
            zip(promise.nodes, promise.num_lost, strict=True),
            zip(training.nodes, self._num_lost(training), strict=True),
            strict=True,
        )
        changed = {now[0] for then, now in pairs if then != now}
        if _are_kept(training, changed) and not is_undone(training.skipped, promise.step):
            self._fail(training, f"resumed from {training.resumed}, with copies of {promise.step}")

    def restored(self, training: Training, parts: Sequence[Part]) -> None:
        """Each rank has loaded this from host memory."""
        job, layout = training.job, training.layout
        for rank, part in enumerate(parts):
            if part.rank == rank:
                continue
            one, other = layout.coordinate(rank), layout.coordinate(part.rank)
            if job.dp_is_sharded or (one.tp, one.pp) != (other.tp, other.pp):
                self._fail(training, f"rank {rank} has restored what rank {part.rank} had")
        part = parts[0]
        for attempt, resumed in self._resumed.get(job.job_id, ()):
            if part.attempt < attempt and resumed < part.step:
                what = f"step {part.step} of a{part.attempt}, which a{attempt} left behind"
                self._fail(training, f"restored {what}")

    def _num_lost(self, training: Training) -> tuple[int, ...]:
        return tuple(self._world.nodes[node].num_lost for node in training.nodes)

    def _fail(self, training: Training, what: str) -> NoReturn:
        name = f"{training.job.job_id}/a{training.attempt}"
        raise Violation(f"invariant 7 at {self._world.hours:.4f} h: {name}: {what}")


def _are_kept(training: Training, changed: Set[NodeId]) -> bool:
    """Whether another node has the state of each rank whose own node has changed."""
    placement = training.placement
    assert placement is not None
    return all(
        any(NodeId(other) not in changed for other in placement.partners([rank]))
        for rank, node in enumerate(training.rank_nodes)
        if node in changed
    )
