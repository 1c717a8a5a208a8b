"""Nodes on Kubernetes: agents in pods, one to a host, and what the cluster says of hosts.

A loop looks at what the machine has decided and at the caches of pods and hosts,
has `reconcile` work out the difference, and `execution` begin with it. Trouble
with the API server is counted, logged and tried again, and stops no look. Nothing
is remembered that a new controller would need, so what nobody foresaw ends the
controller, which starts again: caches that nobody fills would go on being trusted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from controller.changes import Changes
from controller.core.changes import State
from controller.core.node_events import ClusterNews, NodeEvent
from controller.failure import Failure
from controller.kube.api import Kind, KubeApi
from controller.kube.config import KubeConfig
from controller.kube.execution import Execution
from controller.kube.informer import Informer
from controller.kube.observed import Host, Json, Pod, read_host, read_pod
from controller.kube.reconcile import Reconciler
from controller.kube.shares import claims
from controller.kube.training_jobs import JobCalls, TrainingJobs
from controller.kube.view import View
from outlast.clock import Clock
from outlast.ids import NodeId

logger = logging.getLogger(__name__)

# Training changes the state many times a second; the fleet need not be looked at as often.
SPACING_S = 0.2

T = TypeVar("T")


class KubeCluster:
    """One fleet of agents on one cluster."""

    def __init__(
        self,
        config: KubeConfig,
        *,
        state: Callable[[], State],
        incarnations: Callable[[], Mapping[NodeId, str]],
        post: Callable[[NodeEvent | ClusterNews], None],
        changes: Changes,
        clock: Clock,
        calls: JobCalls | None = None,
    ) -> None:
        """`state` is what the machine has decided, `incarnations` who is connected;
        `post` takes what the cluster says, `changes` tells when to look again. `calls` is whom to
        ask for the jobs of TrainingJobs; None: they are not looked at.

        Raises:
            NoClusterError: there are no credentials for an API server.
        """
        # Operations so far, by name and result.
        self.counts: Counter[tuple[str, str]] = Counter()
        self._config = config
        self._state = state
        self._incarnations = incarnations
        self._post = post
        self._changes = changes
        self._clock = clock
        self._api = KubeApi(config)
        self._awake = asyncio.Event()
        self._reconciler = Reconciler(config)
        self._failure = Failure()
        self._execution = Execution(config, self._api, self._reconciler, self._failure, self.counts)
        self._pods: Informer[Pod] = self._informer(self._api.pods, read_pod)
        self._hosts: Informer[Host] = self._informer(self._api.hosts, read_host)
        self._training_jobs = None if calls is None else self._follower(calls)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pods(self) -> Sequence[Pod]:
        """The fleet's pods as they were last seen."""
        return tuple(self._pods.objects.values())

    async def start(self) -> None:
        """Begin to look; what an earlier controller left is found and gone on with."""
        self._pods.start()
        self._hosts.start()
        if self._training_jobs is not None:
            self._training_jobs.start()
        for run in (self._run, self._listen):
            task = asyncio.create_task(run(), name=f"kube{run.__name__}")
            task.add_done_callback(self._failure.note_end)
            self._tasks.append(task)

    async def failed(self) -> None:
        """Raise what nobody foresaw, once there is such a thing: no trouble of API servers."""
        await self._failure.raised()

    async def stop_all(self) -> None:
        """Stop looking. Agents and training go on: pods do not end with their controller."""
        await self.leave()

    async def leave(self) -> None:
        """Stop looking, with everything as it is."""
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._training_jobs is not None:
            await self._training_jobs.leave()
        await asyncio.gather(self._pods.stop(), self._hosts.stop(), self._execution.close())
        self._api.close()

    def provision(self, count: int, workers: int, reason: str) -> None:
        """Nodes are wanted; how many is read from the state."""
        logger.info("nodes wanted: count=%d workers=%d %s", count, workers, reason)
        self._awake.set()

    def evict(self, node: NodeId, reason: str) -> None:
        """A node was given up; which ones were is read from the state."""
        logger.info("node given up: node=%s %s", node, reason)
        self._awake.set()

    async def forget_everything(self) -> None:
        """Delete the fleet's pods and all that belongs to them.

        Hosts in quarantine stay closed: what was wrong with them has not been forgotten.
        """
        listing = await self._execution.call(self._api.list, self._api.pods)
        pods = [read_pod(item) for item in listing.items]
        await asyncio.gather(
            *(self._execution.call(self._api.delete_pod, pod.name, pod.uid) for pod in pods)
        )
        await self._execution.call(self._api.remove_base)

    async def _listen(self) -> None:
        """Look again whenever the machine has decided something."""
        seen = self._changes.version
        while True:
            seen = await self._changes.wait(seen)
            self._awake.set()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._config.patience.look_s):
                    await self._awake.wait()
            except TimeoutError:
                pass
            self._awake.clear()
            if self._pods.is_synced and self._hosts.is_synced:
                self._look()
            await asyncio.sleep(SPACING_S)

    def _look(self) -> None:
        """Tell what there is to tell, and begin with what there is to do."""
        loop = asyncio.get_running_loop()
        state = self._state()
        plan = self._reconciler.plan(
            View(
                now_s=loop.time(),
                wall_s=self._clock.now_s(),
                nodes=state.nodes,
                claims=claims(state.jobs.values(), self._config.workers),
                incarnations=self._incarnations(),
                pods=tuple(self._pods.objects.values()),
                hosts={host.name: host for host in self._hosts.objects.values()},
                refusal=self._execution.refusal,
            )
        )
        for event in plan.events:
            self._post(event)
        self._execution.begin(plan.actions)

    def _informer(self, kind: Kind, read: Callable[[Json], T]) -> Informer[T]:
        return Informer(
            self._api,
            kind,
            read,
            self._config.patience,
            on_change=self._awake.set,
            failure=self._failure,
            counts=self.counts,
        )

    def _follower(self, calls: JobCalls) -> TrainingJobs:
        return TrainingJobs(
            self._config,
            self._api,
            calls,
            state=self._state,
            changes=self._changes,
            clock=self._clock,
            failure=self._failure,
            counts=self.counts,
        )
