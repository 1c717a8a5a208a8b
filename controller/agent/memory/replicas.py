"""Copies of host memory between nodes, as one agent sees them.

Three things per job: its ranks' slots go to the nodes that keep their copies, copies of
other nodes' ranks are kept here, and at the start of an attempt what this node lacks is
fetched. The controller says where the other agents are; who keeps what follows from the
layout.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from checkpoint.core import names
from checkpoint.core.placement import Placement
from checkpoint.replicas.encryption import Encryption
from checkpoint.replicas.fetch import Fetched, Fetcher, Source
from checkpoint.replicas.holder import Duty, Holder
from checkpoint.replicas.placing import num_own_slots, placement_of
from checkpoint.replicas.sender import Replicator
from checkpoint.replicas.wire import Peer
from checkpoint.restore.fetching import Fetching
from controller.agent.config import AgentConfig
from controller.agent.observe.metrics.reading import ReplicaReading
from controller.agent.threads import run_blocking
from controller.ranknodes import rank_nodes
from outlast.spec import JobSpec
from outlast.v1 import agents_pb2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """What an attempt of a job means for the copies on this node."""

    job_id: str
    attempt: int
    memory_dir: Path
    ranks: tuple[int, ...]
    held_ranks: frozenset[int]
    placement: Placement
    peers: Mapping[str, Peer]
    bytes_per_s: float | None

    def holder_of(self, rank: int) -> Peer | None:
        """Who keeps the copies of a rank of this node; None where nobody needs to."""
        holder = self.placement.holders[rank]
        if holder is None:
            return None
        # An agent that takes no copies is like one that cannot be reached.
        return self.peers.get(holder, Peer(node=holder, address="", port=0, token=""))

    def sources_of(self, rank: int) -> tuple[Source, ...]:
        """Who may have the state of a rank of this node, best first."""
        placement = self.placement
        holder = self.holder_of(rank)
        if holder is not None:
            return (Source(peer=holder, rank=rank, own=False),)
        return tuple(
            Source(peer=self.peers[node], rank=twin, own=True)
            for twin in placement.twins_to_ask(rank)
            if (node := placement.rank_nodes[twin]) in self.peers
        )


class _Serving:
    """What goes on for one attempt of a job."""

    def __init__(self, plan: ReplicaPlan) -> None:
        self.plan = plan
        self.replicator: Replicator | None = None
        self.work: asyncio.Task[None] | None = None
        self.over = threading.Event()
        self.fetcher = Fetcher(
            plan.job_id,
            plan.attempt,
            num_slots=num_own_slots(plan.placement),
            pause=self.over.wait,
        )
        self._fetching: dict[int, Fetching] = {}

    def folder_of(self, rank: int) -> Path:
        return self.plan.memory_dir / names.memory_folder(rank)

    def hold_ranks(self) -> None:
        """Let no rank look into its host memory before `fetched`."""
        for rank in self.plan.ranks:
            self._fetching[rank] = Fetching(self.folder_of(rank))

    def fetched(self, rank: int) -> None:
        """There is nothing more to come for this rank."""
        self._fetching.pop(rank).end()

    def release_ranks(self) -> None:
        """Whatever came of it."""
        for rank in list(self._fetching):
            self.fetched(rank)


class ReplicaEvents(Protocol):
    """Hears what goes wrong with copies, in the event loop's thread."""

    def replica_trouble(self, job_id: str, step: int, detail: str) -> None: ...


class Replicas:
    """Everything about copies on this node. Make it inside the agent's event loop."""

    def __init__(self, config: AgentConfig, events: ReplicaEvents) -> None:
        self._node = config.node
        self._events = events
        self._loop = asyncio.get_running_loop()
        secret = secrets.token_hex(16)
        # As the agent's connection to the controller is.
        encryption = None if config.tls_dir is None else Encryption()
        self.token = secret if encryption is None else encryption.token(secret)
        self._holder = Holder(config.memory_dir, config.address, self.token, encryption)
        self._active: dict[str, _Serving] = {}
        self._sent_before = 0
        self.fetches = Counter[str]()
        self.fetched_bytes = 0

    @property
    def port(self) -> int:
        """Where other agents bring their copies."""
        return self._holder.port

    @property
    def reading(self) -> ReplicaReading:
        """Copies that came and went, and how far those of this node's ranks are behind."""
        sent = self._sent_before + sum(one.sent_bytes for one in self._replicators())
        return ReplicaReading(
            bytes={
                "sent": sent,
                "received": self._holder.received_bytes,
                "fetched": self.fetched_bytes,
            },
            outcomes=dict(self._holder.outcomes),
            fetches=dict(self.fetches),
            num_held=len(self._holder.newest_copies()),
            lag_steps=max((one.lag_steps for one in self._replicators()), default=0),
        )

    async def begin(self, plan: ReplicaPlan) -> None:
        """Send and keep copies for this attempt, and fetch what this node lacks.

        Call it before the ranks start: they fork and form groups meanwhile, and then wait for
        what can be had (`checkpoint.restore.fetching`).
        """
        await self._end(plan.job_id)
        serving = _Serving(plan)
        duty = Duty(attempt=plan.attempt, ranks=plan.held_ranks, bytes_per_s=plan.bytes_per_s)
        await run_blocking(lambda: self._holder.take_duty(plan.job_id, duty), "replica-duty")
        if plan.attempt > 1:
            await run_blocking(serving.hold_ranks, "replica-hold")
        self._active[plan.job_id] = serving
        serving.work = asyncio.create_task(self._serve(serving), name=f"replicas-{plan.job_id}")

    async def finish(self, job_id: str) -> None:
        """Send and take nothing more of a job."""
        self._holder.forget(job_id)
        await self._end(job_id)

    async def stop(self) -> None:
        """Drop everything; what is half sent is known to be torn."""
        self._holder.close()
        await asyncio.gather(*(self._end(job_id) for job_id in list(self._active)))

    def _replicators(self) -> list[Replicator]:
        found = (serving.replicator for serving in self._active.values())
        return [replicator for replicator in found if replicator is not None]

    async def _serve(self, serving: _Serving) -> None:
        plan = serving.plan
        if plan.attempt > 1:
            await run_blocking(partial(self._fetch, serving), "replica-fetch")
        if not plan.placement.is_copying or serving.over.is_set():
            return
        serving.replicator = Replicator(
            plan.job_id,
            plan.attempt,
            plan.memory_dir,
            {rank: plan.holder_of(rank) for rank in plan.ranks},
            partial(self._trouble, plan.job_id),
            bytes_per_s=plan.bytes_per_s,
        )
        serving.replicator.start()

    async def _end(self, job_id: str) -> None:
        """End what goes on for a job; a fetch under way is torn, and known to be."""
        serving = self._active.pop(job_id, None)
        if serving is None:
            return
        serving.over.set()
        serving.fetcher.hang_up()
        if serving.work is not None:
            await serving.work
        if serving.replicator is not None:
            await run_blocking(serving.replicator.stop, "replica-stop")
            self._sent_before += serving.replicator.sent_bytes

    def _fetch(self, serving: _Serving) -> None:
        begun_s = time.monotonic()
        plan, fetcher = serving.plan, serving.fetcher
        try:
            for rank in plan.ranks:
                if serving.over.is_set():
                    return
                folder = serving.folder_of(rank)
                self._fetched(plan, fetcher.fetch(rank, folder, plan.sources_of(rank)))
                serving.fetched(rank)
        except Exception as error:
            # A thread that dies silently lets the ranks look into memory that is not filled.
            logger.exception("fetch failed: job=%s", plan.job_id)
            self._trouble(plan.job_id, -1, f"host memory could not be fetched: {error}")
        finally:
            fetcher.close()
            serving.release_ranks()
        logger.info(
            "host memory looked after: job=%s attempt=%d seconds=%.3f",
            *(plan.job_id, plan.attempt, time.monotonic() - begun_s),
        )

    def _fetched(self, plan: ReplicaPlan, result: Fetched) -> None:
        if result.copies:
            self.fetches["fetched"] += 1
            self.fetched_bytes += result.nbytes
            logger.info(
                "host memory fetched: job=%s attempt=%d rank=%d steps=%s bytes=%d",
                *(plan.job_id, plan.attempt, result.rank),
                *([copy.step for copy in result.copies], result.nbytes),
            )
        elif result.problem:
            self.fetches["lost"] += 1
            detail = f"rank {result.rank} has no state in memory anywhere: {result.problem}"
            logger.warning("job=%s attempt=%d %s", plan.job_id, plan.attempt, detail)
            self._trouble(plan.job_id, -1, f"{detail}; storage is next")
        else:
            self.fetches["present"] += 1

    def _trouble(self, job_id: str, step: int, detail: str) -> None:
        try:
            self._loop.call_soon_threadsafe(self._events.replica_trouble, job_id, step, detail)
        except RuntimeError:
            logger.debug("agent is ending; not reported: job=%s %s", job_id, detail)


def replica_plan(
    config: AgentConfig, command: agents_pb2.Command, spec: JobSpec
) -> ReplicaPlan | None:
    """What a start command means for copies; None where the job wants none."""
    start = command.start_workers
    placement = placement_of(spec, rank_nodes(start), shift=start.replica_shift)
    if placement is None:
        return None
    peers = {
        peer.node_id: Peer(
            node=peer.node_id, address=peer.address, port=peer.port, token=peer.token
        )
        for peer in start.replica_peers
    }
    return ReplicaPlan(
        job_id=command.job_id,
        attempt=command.attempt,
        memory_dir=config.job_memory_dir(command.job_id),
        ranks=tuple(start.ranks),
        held_ranks=frozenset(placement.held_on(config.node)),
        placement=placement,
        peers=peers,
        bytes_per_s=spec.checkpoint.replica_bytes_per_s,
    )
