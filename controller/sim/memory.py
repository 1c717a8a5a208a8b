"""What the host memory of nodes holds of a job, and the copies that other nodes keep of it.

By the production rules: `checkpoint.core.placement` says who keeps what, `checkpoint.core.slots`
which slot and which copy gives way, and an order to start where the other agents are. What is
fetched at the start of an attempt becomes the rank's own, as in `checkpoint.replicas.fetch`.

What does not belong here: what slots hold when an attempt stops (`host_memory`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import TYPE_CHECKING

from controller.sim.attempt import Training
from controller.sim.host_memory import Kept, Part, held_after, kept_after, without_stale
from controller.sim.replica_checks import ReplicaChecks
from outlast.ids import JobId, NodeId
from outlast.skipped import is_undone
from outlast.v1 import agents_pb2

if TYPE_CHECKING:
    from controller.sim.world import World

# As in `checkpoint.replicas.fetch`.
_MAX_FETCHED = 2


class Memory:
    """That of all nodes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._checks = ReplicaChecks(world)

    # At the start of an attempt

    def fetch(self, training: Training) -> None:
        """Bring what ranks lack from other nodes, before they look into their memory."""
        if training.placement is None:
            return
        self._take_duty(training)
        known_peers = {
            node: {NodeId(peer.node_id): peer for peer in peers}
            for node, peers in training.peers.items()
        }
        self._checks.check_peers(training, known_peers)
        holders = training.placement.holders
        training.is_copied = training.placement.is_copying and all(
            holder is None or self._reaches(known_peers[node].get(NodeId(holder)))
            for node, holder in zip(training.rank_nodes, holders, strict=True)
        )
        for rank, node in enumerate(training.rank_nodes):
            self._fetch_rank(training, rank, known_peers[node])

    def _take_duty(self, training: Training) -> None:
        """A node keeps no copies but those that are its to keep in this attempt."""
        assert training.placement is not None
        holders, world_size = training.placement.holders, training.world_size
        for node in training.nodes:
            held = self._world.nodes[node].replicas.get(training.job.job_id, {})
            for key in [key for key in held if key[0] != world_size or holders[key[1]] != node]:
                del held[key]

    def _fetch_rank(
        self, training: Training, rank: int, known_peers: Mapping[NodeId, agents_pb2.ReplicaPeer]
    ) -> None:
        node = self._world.nodes[training.rank_nodes[rank]]
        own = node.memory.get(training.job.job_id, {}).get((training.world_size, rank), ())
        newest = max((part[:2] for part in own), default=(0, 0))
        for listed in self._listed(training, rank, known_peers):
            wanted = sorted(part for part in listed if part[:2] > newest)
            if wanted:
                found = (*own, *wanted[-_MAX_FETCHED:])
                memory = node.memory.setdefault(training.job.job_id, {})
                memory[training.world_size, rank] = found
                return

    def _listed(
        self, training: Training, rank: int, known_peers: Mapping[NodeId, agents_pb2.ReplicaPeer]
    ) -> Iterator[tuple[Part, ...]]:
        """What each node has that may have the state of a rank, best first."""
        placement, job_id = training.placement, training.job.job_id
        assert placement is not None
        holder = placement.holders[rank]
        if holder is not None:
            if self._reaches(known_peers.get(NodeId(holder))):
                held = self._world.nodes[NodeId(holder)].replicas.get(job_id, {})
                yield held.get((training.world_size, rank), ())
            return
        for twin in placement.twins_to_ask(rank):
            node = training.rank_nodes[twin]
            if self._reaches(known_peers.get(node)):
                memory = self._world.nodes[node].memory.get(job_id, {})
                yield memory.get((training.world_size, twin), ())

    def _reaches(self, peer: agents_pb2.ReplicaPeer | None) -> bool:
        """Whether an agent answers where it is said to."""
        agent = None if peer is None else self._world.nodes[NodeId(peer.node_id)].agent
        return (
            peer is not None
            and agent is not None
            and (agent.replica_port, agent.incarnation) == (peer.port, peer.token)
        )

    def common(self, training: Training) -> tuple[int, int] | None:
        """The newest step, and its attempt, that all ranks have in host memory."""
        found: set[tuple[int, int]] | None = None
        for rank in range(training.world_size):
            sealed = {
                (part.step, part.attempt)
                for part in self._own(training, rank)
                if not is_undone(training.skipped, part.step)
            }
            found = sealed if found is None else found & sealed
            if not found:
                return None
        return max(found or (), default=None)

    def resumed(self, training: Training) -> None:
        """An attempt trains: what an older one has beyond that is no state of this one."""
        if training.is_from_memory:
            self._checks.restored(training, self._restored(training))
        self._checks.resumed(training)
        for rank, node_id in enumerate(training.rank_nodes):
            held = self._world.nodes[node_id].memory.get(training.job.job_id)
            if held is None:
                continue
            # The slots of an attempt take the place of those of another number of ranks.
            for key in [key for key in held if key[0] != training.world_size]:
                del held[key]
            own = held.get((training.world_size, rank))
            if own is not None:
                held[training.world_size, rank] = without_stale(own, training.resumed)

    def _restored(self, training: Training) -> list[Part]:
        """What each rank has loaded, by rank."""
        step, attempt = self.common(training) or (-1, 0)
        return [
            next(part for part in self._own(training, rank) if part[:2] == (attempt, step))
            for rank in range(training.world_size)
        ]

    def _own(self, training: Training, rank: int) -> tuple[Part, ...]:
        node = self._world.nodes[training.rank_nodes[rank]]
        return node.memory.get(training.job.job_id, {}).get((training.world_size, rank), ())

    # At its end

    def seal(self, training: Training, done: int) -> None:
        """Each rank has sealed the common step, and its neighbour on one side."""
        random, job = self._world.random, training.job
        if job.is_silent:
            return
        # Of the attempt, so that it takes no draw of those that the rest of the story hangs on.
        draws = Random(f"{job.job_id} {training.attempt} {done}")
        kept = kept_after(
            training.resumed,
            done,
            read_share=job.read_share,
            random=draws,
            copy_steps=job.copy_steps if training.is_copied else 0,
            is_from_memory=training.is_from_memory,
        )
        for rank, node_id in enumerate(training.rank_nodes):
            memory = self._world.nodes[node_id].memory.setdefault(job.job_id, {})
            ahead = rank and done < job.last_step and random.random() < 0.3
            steps = kept.of(rank, ahead=bool(ahead))
            self._world.checkers.sealed(training, rank, steps, kept.common)
            before = memory.get((training.world_size, rank), ())
            memory[training.world_size, rank] = tuple(
                _part(training, rank, step, before)
                for step in steps
                if not is_undone(training.skipped, step)
            )
            self._replicate(training, rank, kept, before)
        self._checks.sealed(training, kept, done)

    def _replicate(
        self, training: Training, rank: int, kept: Kept, before: tuple[Part, ...]
    ) -> None:
        """What has arrived on the node that keeps the copies of a rank."""
        holder = None if training.placement is None else training.placement.holders[rank]
        if holder is None or not (kept.copied or kept.is_copying):
            return
        held = self._world.nodes[NodeId(holder)].replicas.setdefault(training.job.job_id, {})
        key = (training.world_size, rank)
        # Of many only the last ones are still there.
        arrived = [_part(training, rank, step, before) for step in kept.copied[-3:]]
        held[key] = held_after(held.get(key, ()), arrived, is_torn=kept.is_copying)

    def newest_everywhere(self, job: JobId) -> int:
        """The step that is the newest in the memory of every rank's node; -1 when they differ."""
        newest: dict[tuple[int, int], int] = {}
        for node in self._world.nodes.values():
            for key, parts in node.memory.get(job, {}).items():
                step = -1
                for part in parts:
                    # Nodes ask every ten seconds, and `max` takes twice as long.
                    if part.step > step:
                        step = part.step
                newest[key] = step
        sizes = {world_size for world_size, _ in newest}
        steps = set(newest.values())
        is_whole = len(sizes) == 1 and len(newest) == sizes.pop()
        return steps.pop() if is_whole and len(steps) == 1 else -1


def _part(training: Training, rank: int, step: int, before: tuple[Part, ...]) -> Part:
    """The state that a rank has sealed, or that it had when its attempt began."""
    if step == training.resumed:
        found = (part for part in before if part.step == step)
        return max(found, default=Part(training.attempt, step, rank))
    return Part(training.attempt, step, rank)
