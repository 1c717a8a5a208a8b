"""The adapter when something is in its way: refusals, slow answers, and its own mistakes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from controller.app import LoopEndedError, run
from controller.core.states import NodeState
from controller.failure import Failure
from controller.kube.api import Kind, KubeApi, Listing, WatchStream
from controller.kube.errors import RefusedError, UnreachableError
from controller.kube.informer import Informer
from controller.kube.observed import Json
from controller.kube.reconcile import Reconciler
from controller.options import Options
from outlast.ids import JobId
from tests.kube.cluster import Kube
from tests.kube.fleets import HURRIED, Fleet, fleet

pytestmark = pytest.mark.timeout(120)

QUOTA = "exceeded quota: gpus"


def test_refused_pods_hold_up_no_sign_and_their_job_says_why(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        # Nobody would wait for a pause that long, which follows a watch that is shorter, too.
        long: dict[str, Any] = {"retry_s": 300.0, "retry_max_s": 300.0, "watch_s": 300.0}
        async with fleet(kube, tmp_path, **long) as it:
            await it.running(2)
            monkeypatch.setattr(KubeApi, "create_pod", refuse)
            second = JobId("second")
            it.submit(job=second, nodes=1)
            await it.until(
                lambda: QUOTA in it.driver.job(second).reason, "the job to say what it lacks"
            )
            lost = it.driver.job().nodes[0]
            assert lost is not None
            await asyncio.to_thread(it.kubelets.fail, lost)
            await it.until(lambda: it.node(lost).state is NodeState.RETIRED, "the loss")

    def refuse(self: KubeApi, manifest: Json) -> Json:
        raise RefusedError(QUOTA, status=403)

    asyncio.run(scenario())


def test_server_that_is_slow_to_make_a_pod_holds_up_no_sign(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = threading.Event(), threading.Event()

    async def scenario() -> None:
        async with fleet(kube, tmp_path) as it:
            await it.running(2)
            monkeypatch.setattr(KubeApi, "create_pod", wait)
            it.submit(job=JobId("second"), nodes=1)
            await it.until(asked.is_set, "a pod to be asked for")
            lost = it.driver.job().nodes[0]
            assert lost is not None
            try:
                await asyncio.to_thread(it.kubelets.fail, lost)
                await it.until(lambda: it.node(lost).state is NodeState.RETIRED, "the loss")
            finally:
                answered.set()

    def wait(self: KubeApi, manifest: Json) -> Json:
        asked.set()
        answered.wait()
        raise UnreachableError("too late")

    asyncio.run(scenario())


def test_failed_action_rests_and_is_tried_again(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = KubeApi.create_pod
    refusals = iter(range(2))

    def refuse_twice(self: KubeApi, manifest: Json) -> Json:
        if next(refusals, None) is not None:
            raise RefusedError(QUOTA, status=403)
        return create(self, manifest)

    monkeypatch.setattr(KubeApi, "create_pod", refuse_twice)

    async def scenario() -> None:
        async with fleet(kube, tmp_path, hosts=1) as it:
            it.submit(nodes=1)
            await it.until(lambda: it.kubelets.hosts_in_use() == ["host-0"], "the pod after all")
            assert it.cluster.counts["CreatePod", "failed"] == 2
            await it.until(lambda: QUOTA not in it.driver.job().reason, "the reason to go")

    asyncio.run(scenario())


# Its own mistakes


def broken(*_: object) -> Any:
    raise RuntimeError("nobody foresaw this")


MISTAKES = {
    "loop": (Reconciler, "plan"),
    "action": (KubeApi, "create_pod"),
    "thread of a watch": (KubeApi, "watch"),
}


@pytest.mark.parametrize("where", MISTAKES)
def test_what_nobody_foresaw_is_no_secret(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Caches that nobody fills any more would go on being trusted."""
    monkeypatch.setattr(*MISTAKES[where], broken)

    async def scenario() -> None:
        async with fleet(kube, tmp_path, hosts=1) as it:
            it.submit(nodes=1)
            with pytest.raises(RuntimeError, match="nobody foresaw"):
                await it.cluster.failed()

    asyncio.run(scenario())


def test_controller_ends_when_its_cluster_side_has(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reconciler, "plan", broken)

    async def live() -> None:
        config = Fleet(kube, tmp_path).config
        options = Options(
            state_dir=tmp_path / "state", grpc="127.0.0.1:0", http="127.0.0.1:0", kube=config
        )
        await run(options)

    with pytest.raises(LoopEndedError, match="its cluster failed: nobody foresaw this"):
        asyncio.run(live())


# Figures


class Noting(Counter[tuple[str, str]]):
    """Notes which threads count."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def __setitem__(self, key: tuple[str, str], value: int) -> None:
        self.threads.add(threading.get_ident())
        super().__setitem__(key, value)


class Unreachable:
    """A server that lists once and never answers again."""

    def list(self, kind: Kind) -> Listing:
        return Listing(items=(), version="1")

    def watch(self, kind: Kind, version: str) -> WatchStream:
        raise UnreachableError("away")


def test_counts_change_in_the_loop_only() -> None:
    """A scrape reads them there: it must never meet a dictionary that grows."""
    counts = Noting()

    async def read() -> None:
        informer = Informer(
            Unreachable(),
            Kind(name="pods", path="/pods"),
            lambda item: item,
            HURRIED,
            on_change=lambda: None,
            failure=Failure(),
            counts=counts,
        )
        informer.start()
        async with asyncio.timeout(30):
            while not counts["List pods", "failed"]:
                await asyncio.sleep(0.01)
        await informer.stop()

    asyncio.run(read())
    assert counts["List pods", "ok"]
    assert counts.threads == {threading.get_ident()}
