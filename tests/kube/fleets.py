"""The adapter with a real machine and played hosts: agents join when their pods run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from controller.changes import Changes
from controller.core import events as ev
from controller.core.changes import State, fold
from controller.core.node_events import NodeDisconnected, NodeEvent
from controller.core.records import NodeRecord
from controller.kube.cluster import KubeCluster
from controller.kube.config import KubeConfig, Patience
from controller.kube.training_jobs import JobCalls
from outlast.ids import NodeId
from tests.controller.core.driver import Driver
from tests.controller.fakes import until
from tests.kube.cluster import Kube
from tests.kube.kubelets import Kubelets

HURRIED = Patience(
    request_s=5.0,
    watch_s=2.0,
    dead_link_s=1.0,
    look_s=0.2,
    retry_s=0.1,
    retry_max_s=0.5,
    idle_s=60.0,
    join_s=60.0,
    evict_s=1.0,
    terminate_s=1.0,
)


class Fleet:
    """What a test steers, and what it looks at."""

    def __init__(
        self,
        kube: Kube,
        folder: Path,
        state: State | None = None,
        calls: JobCalls | None = None,
    ) -> None:
        self.kube = kube
        self._calls = calls
        self.core: Any = kube.core()
        self.driver = Driver(state)
        # Ahead of the server, whose hosts must be older than the machine's quarantines.
        self.driver.now_s = time.time() + 3600.0
        self.connected: dict[NodeId, str] = {}
        self.posted: list[NodeEvent] = []
        self.kubelets = Kubelets(
            kube.core(),
            kube.namespace,
            folder,
            folder,
            runs=False,
            on_began=self._in_loop(self._join),
            on_ended=self._in_loop(self._leave),
        )
        self.config = KubeConfig(
            namespace=kube.namespace,
            image="outlast:test",
            controller="127.0.0.1:1",
            workers=1,
            num_devices=0,
            config_file=kube.write_config(folder / "kubeconfig"),
            patience=HURRIED,
        )
        self._changes = Changes()
        self._loop = asyncio.get_running_loop()
        self.cluster = self._make_cluster()

    async def restart(self, state: State | None = None) -> None:
        """A new controller: it knows what the journal says, and nothing else."""
        await self.cluster.leave()
        now_s = self.driver.now_s
        self.driver = Driver(state or fold(self.driver.machine.state.as_changes()))
        self.driver.now_s = now_s
        for host, uid in self.connected.items():
            self.driver.join(host, incarnation=uid)
        self.cluster = self._make_cluster()
        await self.cluster.start()

    def tell(self, event: ev.Event) -> None:
        """Something happens to the machine."""
        self.driver.send(event)
        self._changes.fire()

    def submit(self, **changes: object) -> None:
        self.driver.submit(**changes)
        self._changes.fire()

    def cancel(self) -> None:
        self.tell(ev.JobCancelRequested(job_id=self.driver.job().job_id))

    def node(self, name: str) -> NodeRecord:
        return self.driver.node(name)

    def host(self, name: str) -> Any:
        return self.core.read_node(name)

    def pods(self) -> list[Any]:
        return list(self.core.list_namespaced_pod(self.kube.namespace).items)

    async def running(self, num_nodes: int) -> None:
        """A job that trains on so many nodes."""
        self.submit(nodes=num_nodes)
        await self.until(lambda: str(self.driver.job().state) == "PREFLIGHT", "the preflight")
        self.driver.answer_all("/suite/")
        self.driver.answer_all("/start/")
        self.driver.advanced(1)
        assert self.driver.job().state == "RUNNING"
        self._changes.fire()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        await until(condition, what, within_s=60.0)

    def _make_cluster(self) -> KubeCluster:
        return KubeCluster(
            self.config,
            state=lambda: self.driver.machine.state,
            incarnations=lambda: dict(self.connected),
            post=self._post,
            changes=self._changes,
            clock=_DriverClock(self),
            calls=self._calls,
        )

    def _post(self, event: NodeEvent) -> None:
        self.posted.append(event)
        self.tell(event)

    def _in_loop(self, call: Callable[[str, str], None]) -> Callable[[str, str], None]:
        return lambda host, uid: self._loop.call_soon_threadsafe(call, host, uid) and None

    def _join(self, host: str, uid: str) -> None:
        self.connected[NodeId(host)] = uid
        self.driver.join(host, incarnation=uid)
        self._changes.fire()

    def _leave(self, host: str, uid: str) -> None:
        if self.connected.get(NodeId(host)) == uid:
            del self.connected[NodeId(host)]
            self.tell(NodeDisconnected(node=NodeId(host)))


class _DriverClock:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def now_s(self) -> float:
        return self._fleet.driver.now_s


@asynccontextmanager
async def fleet(
    kube: Kube, folder: Path, *, hosts: int = 3, calls: JobCalls | None = None, **changes: Any
) -> AsyncIterator[Fleet]:
    """A cluster of so many hosts with an adapter that runs; `changes` are its patience."""
    made = Fleet(kube, folder, calls=calls)
    if changes:
        made.config = replace(made.config, patience=replace(HURRIED, **changes))
        made.cluster = made._make_cluster()
    for number in range(hosts):
        made.kubelets.add_host(f"host-{number}")
    made.kubelets.start()
    try:
        await made.cluster.start()
        yield made
    finally:
        await made.cluster.leave()
        await asyncio.to_thread(made.kubelets.stop)
    assert not made.kubelets.errors
