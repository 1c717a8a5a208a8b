"""Nodes on Kubernetes: agents in pods, one to a host, and what the cluster says of hosts.

A loop looks at what the machine has decided and at the caches of pods and hosts,
has `reconcile` work out the difference, and does it: calls of the API server run
in threads, each with a deadline, many at once. Trouble with the API server stops
nothing but this loop's own work; it is counted, logged and tried again. Nothing
is remembered that a new controller would need.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, assert_never

from controller.core.events import NodeEvent, NodesAwaited
from controller.core.facts import State
from controller.kube import objects
from controller.kube.actions import (
    Action,
    CreatePod,
    DeletePod,
    EvictPod,
    LabelPod,
    PatchHost,
    ProbeHost,
    RemoveBase,
)
from controller.kube.api import KubeApi
from controller.kube.config import KubeConfig
from controller.kube.errors import (
    ConflictError,
    KubeError,
    NotFoundError,
    TooManyRequestsError,
)
from controller.kube.observed import Host, Pod, read_host, read_pod
from controller.kube.reconcile import Reconciler
from controller.kube.view import View, num_wanted
from controller.kube.watch import FAILED, OK, Informer
from controller.service import Changes
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
        post: Callable[[NodeEvent | NodesAwaited], None],
        changes: Changes,
        clock: Clock,
    ) -> None:
        """`state` is what the machine has decided, `incarnations` who is connected;
        `post` takes what the cluster says, `changes` tells when to look again.

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
        self._pods: Informer[Pod] = Informer(
            self._api, self._api.pods, read_pod, config.patience, self._awake.set, self.counts
        )
        self._hosts: Informer[Host] = Informer(
            self._api, self._api.hosts, read_host, config.patience, self._awake.set, self.counts
        )
        self._threads = ThreadPoolExecutor(config.max_parallel, thread_name_prefix="kube")
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pods(self) -> Sequence[Pod]:
        """The fleet's pods as they were last seen."""
        return tuple(self._pods.objects.values())

    async def start(self) -> None:
        """Begin to look; what an earlier controller left is found and gone on with."""
        self._pods.start()
        self._hosts.start()
        for run in (self._run, self._listen):
            task = asyncio.create_task(run(), name=f"kube{run.__name__}")
            task.add_done_callback(_log_failure)
            self._tasks.append(task)

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
        await asyncio.gather(self._pods.stop(), self._hosts.stop())
        self._threads.shutdown(wait=False, cancel_futures=True)
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
        listing = await self._call(self._api.list, self._api.pods)
        pods = [read_pod(item) for item in listing.items]
        await asyncio.gather(
            *(self._call(self._api.delete_pod, pod.name, pod.uid, None) for pod in pods)
        )
        await self._call(self._api.remove_base)

    async def _listen(self) -> None:
        """Look again whenever the machine has decided something."""
        seen = self._changes.version
        while True:
            seen = await self._changes.wait(seen)
            self._awake.set()

    async def _run(self) -> None:
        patience = self._config.patience
        pause_s = patience.retry_s
        while True:
            try:
                async with asyncio.timeout(patience.look_s):
                    await self._awake.wait()
            except TimeoutError:
                pass
            self._awake.clear()
            if not (self._pods.is_synced and self._hosts.is_synced):
                continue
            if await self._look():
                pause_s = patience.retry_s
                await asyncio.sleep(SPACING_S)
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, patience.retry_max_s)

    async def _look(self) -> bool:
        """Do what there is to do; whether the API server did all that it was asked."""
        loop = asyncio.get_running_loop()
        state = self._state()
        plan = self._reconciler.plan(
            View(
                now_s=loop.time(),
                wall_s=self._clock.now_s(),
                nodes=state.nodes,
                num_wanted=num_wanted(state.jobs.values(), self._config.workers),
                incarnations=self._incarnations(),
                pods=tuple(self._pods.objects.values()),
                hosts={host.name: host for host in self._hosts.objects.values()},
            )
        )
        for event in plan.events:
            self._post(event)
        return await self._do_all(plan.actions)

    async def _do_all(self, actions: Sequence[Action]) -> bool:
        """Do all of it at once, as far as that goes; whether nothing failed."""
        anchor_uid, has_base = "", True
        if any(isinstance(action, CreatePod | ProbeHost) for action in actions):
            try:
                anchor_uid = await self._call(self._api.make_base)
            except KubeError as error:
                self._failed("MakeBase", error)
                has_base = False
                actions = [a for a in actions if not isinstance(a, CreatePod | ProbeHost)]
        done = await asyncio.gather(*(self._try(action, anchor_uid) for action in actions))
        return has_base and all(done)

    async def _try(self, action: Action, anchor_uid: str) -> bool:
        """Do one thing; False when the API server is in trouble or refuses us."""
        name = type(action).__name__
        try:
            await self._do(action, anchor_uid)
        except (ConflictError, NotFoundError) as error:
            # It is done already, or has changed: the next look sees it as it is.
            logger.debug("%s is looked at again: %s", name, error)
        except TooManyRequestsError as error:
            if not isinstance(action, EvictPod):
                self._failed(name, error)
                return False
            now_s = asyncio.get_running_loop().time()
            self._reconciler.refused(action.uid, now_s, error.after_s)
            logger.info("eviction waits: pod=%s %s", action.name, error)
        except KubeError as error:
            self._failed(name, error)
            return False
        else:
            self.counts[name, OK] += 1
        return True

    async def _do(self, action: Action, anchor_uid: str) -> None:
        api = self._api
        match action:
            case CreatePod(name=name, avoid=avoid):
                manifest = objects.agent_pod(self._config, name, anchor_uid, avoid)
                await self._call(api.create_pod, manifest)
                logger.info("pod created: pod=%s avoided=%d", name, len(avoid))
            case ProbeHost(name=name, host=host, session=session):
                manifest = objects.probe_pod(self._config, name, anchor_uid, host, session)
                await self._call(api.create_pod, manifest)
                logger.info("host is tried again: host=%s pod=%s", host, name)
            case DeletePod(name=name, uid=uid, grace_s=grace_s, why=why):
                await self._call(api.delete_pod, name, uid, grace_s)
                logger.info("pod deleted: pod=%s grace_s=%s %s", name, grace_s, why)
            case EvictPod(name=name, uid=uid, why=why):
                await self._call(api.evict_pod, name, uid)
                logger.info("pod evicted: pod=%s %s", name, why)
            case LabelPod(name=name, job=job):
                await self._call(api.label_pod, name, job)
            case PatchHost(host=host, patch=patch, what=what):
                await self._call(api.patch_host, host, patch)
                logger.warning("%s of a host: host=%s", what, host)
            case RemoveBase():
                await self._call(api.remove_base)
                self._reconciler.base_removed()
            case _:
                assert_never(action)

    def _failed(self, what: str, error: KubeError) -> None:
        self.counts[what, FAILED] += 1
        logger.warning("the API server did not do %s, trying again: %s", what, error)

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        # Jobs train on; what is lost is only what this loop would have done for them.
        logger.error("%s failed", task.get_name(), exc_info=task.exception())
