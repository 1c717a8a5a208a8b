"""Does what a plan says, side by side, and never holds up the next look.

An action that is under way is not begun again, and one that failed rests before
its next attempt, twice as long each time; what a later plan leaves out is forgotten.
So one thing that the API server refuses, or is slow to do, costs no other any time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, assert_never

from controller.failure import Failure
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
    RefusedError,
    TooManyRequestsError,
)
from controller.kube.informer import FAILED, OK
from controller.kube.reconcile import Reconciler

logger = logging.getLogger(__name__)

# As an eviction is answered when several budgets cover a pod: an error, and no passing one.
_SERVER_ERROR = 500

T = TypeVar("T")


class Execution:
    """The hands of one fleet's controller."""

    def __init__(
        self,
        config: KubeConfig,
        api: KubeApi,
        reconciler: Reconciler,
        failure: Failure,
        counts: Counter[tuple[str, str]],
    ) -> None:
        """`reconciler` hears what no later look can see; `failure` what nobody
        foresaw; `counts` counts actions by name and result."""
        # Why the last pod that was wanted could not be made.
        self.refusal = ""
        self._config = config
        self._api = api
        self._reconciler = reconciler
        self._failure = failure
        self._counts = counts
        self._threads = ThreadPoolExecutor(config.max_parallel, thread_name_prefix="kube")
        self._under_way: dict[str, tuple[Action, asyncio.Task[None]]] = {}
        # How long what failed rests, and until when.
        self._resting: dict[str, tuple[float, float]] = {}
        self._base: asyncio.Task[str] | None = None

    def begin(self, actions: Sequence[Action]) -> None:
        """Begin with all that is not under way already and need not rest."""
        now_s = asyncio.get_running_loop().time()
        asked = {_name(action): action for action in actions}
        self._resting = {name: rest for name, rest in self._resting.items() if name in asked}
        for name, action in asked.items():
            _, until_s = self._resting.get(name, (0.0, now_s))
            if name not in self._under_way and now_s >= until_s and self._is_free_for(action):
                task = asyncio.create_task(self._try(name, action), name=name)
                self._under_way[name] = (action, task)
                task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Begin nothing more; what threads are in the middle of comes to its end."""
        tasks = [task for _, task in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Call the API server in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)

    def _is_free_for(self, action: Action) -> bool:
        """Pods belong to the base: it is not taken away while one is made, nor the other way."""
        under_way = [other for other, _ in self._under_way.values()]
        match action:
            case RemoveBase():
                return not any(isinstance(other, CreatePod | ProbeHost) for other in under_way)
            case CreatePod() | ProbeHost():
                return RemoveBase() not in under_way
            case _:
                return True

    async def _try(self, name: str, action: Action) -> None:
        """Do one thing, and note what became of it."""
        kind = type(action).__name__
        try:
            await self._do(action)
        except (ConflictError, NotFoundError) as error:
            # It is done already, or has changed: the next look sees it as it is.
            logger.debug("%s is looked at again: %s", name, error)
        except KubeError as error:
            if isinstance(action, EvictPod) and _is_refused(error):
                now_s = asyncio.get_running_loop().time()
                self._reconciler.refused(action.uid, now_s, error.after_s)
                logger.info("eviction waits: pod=%s %s", action.name, error)
                return
            if isinstance(action, CreatePod | ProbeHost):
                self.refusal = str(error)
            self._failed(kind, name, error)
        else:
            self._resting.pop(name, None)
            self._counts[kind, OK] += 1

    async def _do(self, action: Action) -> None:
        api = self._api
        match action:
            case CreatePod(name=name, avoid=avoid, image=image):
                anchor_uid = await self._anchor_uid()
                manifest = objects.agent_pod(self._config, name, anchor_uid, avoid, image)
                await self.call(api.create_pod, manifest)
                self.refusal = ""
                what = image or self._config.image
                logger.info("pod created: pod=%s avoided=%d image=%s", name, len(avoid), what)
            case ProbeHost(name=name, host=host, session=session):
                anchor_uid = await self._anchor_uid()
                manifest = objects.probe_pod(self._config, name, anchor_uid, host, session)
                await self.call(api.create_pod, manifest)
                logger.info("host is tried again: host=%s pod=%s", host, name)
            case DeletePod(name=name, uid=uid, grace_s=grace_s, why=why):
                await self.call(api.delete_pod, name, uid, grace_s)
                logger.info("pod deleted: pod=%s grace_s=%s %s", name, grace_s, why)
            case EvictPod(name=name, uid=uid, why=why):
                await self.call(api.evict_pod, name, uid)
                logger.info("pod evicted: pod=%s %s", name, why)
            case LabelPod(name=name, uid=uid, job=job):
                await self.call(api.label_pod, name, uid, job)
            case PatchHost(host=host, patch=patch, what=what):
                await self.call(api.patch_host, host, patch)
                logger.warning("%s of a host: host=%s", what, host)
            case RemoveBase():
                await self.call(api.remove_base)
                self._reconciler.base_removed()
            case _:
                assert_never(action)

    async def _anchor_uid(self) -> str:
        """The owner of new pods, made once for all that are made side by side."""
        if self._base is None or self._base.done():
            self._base = asyncio.create_task(self._make_base(), name="MakeBase")
        return await self._base

    async def _make_base(self) -> str:
        try:
            return await self.call(self._api.make_base)
        except KubeError as error:
            self._counts["MakeBase", FAILED] += 1
            # Not its own kind: a namespace that is not there is no pod that is gone.
            raise KubeError(f"the owner of the pods cannot be made: {error}") from error

    def _failed(self, kind: str, name: str, error: KubeError) -> None:
        patience = self._config.patience
        rested_s, _ = self._resting.get(name, (0.0, 0.0))
        rest_s = min(2 * rested_s or patience.retry_s, patience.retry_max_s)
        self._resting[name] = (rest_s, asyncio.get_running_loop().time() + rest_s)
        self._counts[kind, FAILED] += 1
        logger.warning(
            "the API server did not do %s, trying again: pause_s=%.1f %s", name, rest_s, error
        )

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task.get_name()]
        self._failure.note_end(task)


def _name(action: Action) -> str:
    """Tells an action from all others that a plan may hold, in a log as well."""
    match action:
        case CreatePod(name=what) | ProbeHost(name=what):
            return f"{type(action).__name__} {what}"
        case DeletePod(name=what, uid=uid, grace_s=grace_s):
            return f"DeletePod {what} {uid} {grace_s}"
        case EvictPod(name=what, uid=uid) | LabelPod(name=what, uid=uid):
            return f"{type(action).__name__} {what} {uid}"
        case PatchHost(host=host, what=what):
            return f"PatchHost {host} {what}"
        case RemoveBase():
            return "RemoveBase"
        case _:
            assert_never(action)


def _is_refused(error: KubeError) -> bool:
    """Whether a disruption budget stands in the way of an eviction."""
    is_answer = isinstance(error, RefusedError) and error.status == _SERVER_ERROR
    return is_answer or isinstance(error, TooManyRequestsError)
