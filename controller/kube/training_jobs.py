"""TrainingJobs of the cluster: submitted, followed and cancelled as `training_job` decides.

Nothing is remembered: an object's job is found by the id of its request, and what was done last is
in its status. So a controller that starts goes on where the last one was, and an object that was
deleted meanwhile has its job cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, assert_never

from controller.changes import Changes
from controller.core.changes import State
from controller.core.frozen import replace
from controller.core.kinds import Wanted
from controller.core.records import JobRecord
from controller.core.states import TERMINAL
from controller.failure import Failure
from controller.kube import training_job
from controller.kube.api import KubeApi
from controller.kube.config import USUAL_FLEET, KubeConfig
from controller.kube.errors import ConflictError, KubeError, NotFoundError
from controller.kube.informer import FAILED, OK, Informer
from controller.kube.observed import Json
from controller.kube.training_job import Step, TrainingJob, read_training_job
from controller.own_calls import CallFailedError, WaitsError
from controller.ratelimit import RateLimitedLog
from outlast.clock import Clock

logger = logging.getLogger(__name__)

# Training changes the state many times a second; the objects need not be looked at as often.
_SPACING_S = 1.0
# A job's steps alone are written so often.
_STEP_EVERY_S = 15.0
# Calls of the API server under way at the same time.
_MAX_PARALLEL = 4


class JobCalls(Protocol):
    """The Jobs service, as it is called for objects of the cluster."""

    async def submit(self, document: dict[str, object], request_id: str) -> str:
        """Why the job is refused for good; "" once there is one."""

    async def cancel(self, job_id: str) -> None: ...

    async def pause(self, job_id: str) -> None: ...

    async def resume(self, job_id: str) -> None: ...

    async def close(self) -> None: ...


class TrainingJobs:
    """The TrainingJobs of one namespace that are for one fleet."""

    def __init__(
        self,
        config: KubeConfig,
        api: KubeApi,
        calls: JobCalls,
        *,
        state: Callable[[], State],
        changes: Changes,
        clock: Clock,
        failure: Failure,
        counts: Counter[tuple[str, str]],
    ) -> None:
        """`failure` hears what nobody foresaw; `counts` counts what is done, by name and result."""
        self._config = config
        self._api = api
        self._calls = calls
        self._state = state
        self._changes = changes
        self._clock = clock
        self._failure = failure
        self._counts = counts
        self._log = RateLimitedLog(logger)
        self._awake = asyncio.Event()
        self._informer: Informer[TrainingJob] = Informer(
            api,
            api.training_jobs,
            read_training_job,
            config.patience,
            on_change=self._awake.set,
            failure=failure,
            counts=counts,
        )
        # When the status of each was last written, by uid, and what it said.
        self._written: dict[str, tuple[float, Json]] = {}
        # How long what failed rests, and until when, by what it is about.
        self._resting: dict[str, tuple[float, float]] = {}
        self._threads = ThreadPoolExecutor(_MAX_PARALLEL, thread_name_prefix="training-jobs")
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow them."""
        self._informer.start()
        for run in (self._run, self._listen):
            task = asyncio.create_task(run(), name=f"training jobs{run.__name__}")
            task.add_done_callback(self._failure.note_end)
            self._tasks.append(task)

    async def leave(self) -> None:
        """Follow them no more; jobs go on."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            await self._informer.stop()
            await self._calls.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _listen(self) -> None:
        seen = self._changes.version
        while True:
            seen = await self._changes.wait(seen)
            self._awake.set()
            await asyncio.sleep(_SPACING_S)

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STEP_EVERY_S):
                    await self._awake.wait()
            self._awake.clear()
            if self._informer.is_synced:
                await self._look()
            await asyncio.sleep(_SPACING_S)

    async def _look(self) -> None:
        fleet = self._config.fleet
        objects = [
            each for each in self._informer.objects.values() if (each.fleet or USUAL_FLEET) == fleet
        ]
        prefix = training_job.request_prefix(self._config.namespace)
        jobs = {
            job.request_id.removeprefix(prefix): job
            for job in self._state().jobs.values()
            if job.owner == training_job.OWNER and job.request_id.startswith(prefix)
        }
        there = {each.uid for each in objects}
        self._written = {uid: when for uid, when in self._written.items() if uid in there}
        gone = {uid: job for uid, job in jobs.items() if uid not in there}
        about = there | set(gone)
        self._resting = {uid: rest for uid, rest in self._resting.items() if uid in about}
        now_s = asyncio.get_running_loop().time()
        due = {uid for uid in about if now_s >= self._resting.get(uid, (0.0, 0.0))[1]}
        await asyncio.gather(
            *(
                self._tried("Follow", each.uid, self._follow(each, jobs.get(each.uid)))
                for each in objects
                if each.uid in due
            ),
            *(
                self._tried("Cancel", uid, self._cancel(job))
                for uid, job in gone.items()
                if uid in due
            ),
        )

    async def _tried(self, what: str, uid: str, work: Coroutine[Any, Any, None]) -> None:
        """One thing that goes wrong costs no other, and is tried again at a later look."""
        try:
            await work
        except (ConflictError, NotFoundError) as error:
            logger.debug("%s is looked at again: %s", what, error)
        except (KubeError, CallFailedError) as error:
            self._counts[f"{what} trainingjobs", FAILED] += 1
            self._log.warning((what,), "%s of TrainingJobs is tried again: %s", what, error)
            self._rest(uid)

    def _rest(self, uid: str) -> None:
        """Try no more for a while, twice as long each time."""
        patience = self._config.patience
        rested_s, _ = self._resting.get(uid, (0.0, 0.0))
        rest_s = min(2 * rested_s or patience.retry_s, patience.retry_max_s)
        self._resting[uid] = (rest_s, asyncio.get_running_loop().time() + rest_s)

    async def _follow(self, wanted: TrainingJob, job: JobRecord | None) -> None:
        now_s = self._clock.now_s()
        written_s, written = self._written.get(wanted.uid, (0.0, {}))
        # A watch is behind what was written just now.
        wanted = replace(wanted, status={**wanted.status, **written})
        step = training_job.step_for(wanted, job)
        status = None
        if step is not None:
            status = await self._done(step, wanted, job, now_s)
            job = self._job_of(wanted)
        if status is None:
            status = training_job.status_of(wanted, job, now_s)
        is_step_due = now_s - written_s >= _STEP_EVERY_S
        has_news = training_job.has_news(wanted.status, status, is_step_due=is_step_due)
        if status and (has_news or wanted.foreign):
            await self._write(wanted, status, now_s)
        if status.get("state") == training_job.WAITING:
            self._rest(wanted.uid)
        else:
            self._resting.pop(wanted.uid, None)

    async def _write(self, wanted: TrainingJob, status: Json, now_s: float) -> None:
        patch = {**dict.fromkeys(wanted.foreign), **status}
        await self._in_thread(self._api.patch_training_job, wanted.name, patch)
        self._written[wanted.uid] = (now_s, status)
        self._counts["Status trainingjobs", OK] += 1
        event = training_job.event_about(wanted, self._config.namespace, status, now_s)
        if event is not None:
            await self._in_thread(self._api.create_event, event)

    async def _done(
        self, step: Step, wanted: TrainingJob, job: JobRecord | None, now_s: float
    ) -> Json | None:
        """Do what is to be done; the status of an object that has no job all the same."""
        match step:
            case Step.SUBMIT:
                request_id = training_job.request_id(self._config.namespace, wanted.uid)
                try:
                    why = await self._calls.submit(dict(wanted.document), request_id)
                except WaitsError as error:
                    return training_job.waits(wanted, str(error), now_s)
                if why:
                    logger.info("TrainingJob refused: name=%s %s", wanted.name, why)
                    return training_job.refused(wanted, why, now_s)
                logger.info("TrainingJob submitted: name=%s uid=%s", wanted.name, wanted.uid)
            case Step.PAUSE:
                assert job is not None, "there is one to pause"
                await self._calls.pause(job.job_id)
            case Step.RESUME:
                assert job is not None, "there is one to resume"
                await self._calls.resume(job.job_id)
            case _:
                assert_never(step)
        self._counts[f"{step.value.capitalize()} trainingjobs", OK] += 1
        return None

    async def _cancel(self, job: JobRecord) -> None:
        if job.state in TERMINAL or job.wanted is Wanted.CANCEL:
            return
        logger.info("TrainingJob is gone: its job is cancelled: job=%s", job.job_id)
        await self._calls.cancel(job.job_id)
        self._counts["Cancel trainingjobs", OK] += 1

    def _job_of(self, wanted: TrainingJob) -> JobRecord | None:
        request_id = training_job.request_id(self._config.namespace, wanted.uid)
        asked = (request_id, training_job.OWNER)
        jobs = self._state().jobs.values()
        return next((job for job in jobs if (job.request_id, job.owner) == asked), None)

    async def _in_thread(self, call: Callable[..., None], *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
