"""Guards sealed host-memory checkpoints of this node's ranks, and moves them to storage.

One `Guard` (`checkpoint.stage.guarding`) and one `Uploader` (`checkpoint.upload.uploader`),
threads both, per job that has run here. They belong to the agent, not to the workers, so a
killed worker loses nothing: what it sealed still gets its checksums and is still
uploaded. What happens is reported as events.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from checkpoint.core.manifest import CommitRecord
from checkpoint.core.pacing import TransferLimits
from checkpoint.core.retention import RetentionPolicy
from checkpoint.stage.damage import Damage
from checkpoint.stage.guarding import Guard, GuardCounts
from checkpoint.storage.root_owner import Owner
from checkpoint.upload.commit import CommitRules, Committed
from checkpoint.upload.uploader import Uploader
from controller.agent.threads import run_blocking
from outlast import private
from outlast.chosen import ChosenStart
from outlast.crashpoints import CrashPoint, reach
from outlast.errors import RetryableError

logger = logging.getLogger(__name__)

PLAN_FILE = "upload.json"
# Over the deadline of one upload: the commit waits for the parts of other nodes.
DRAIN_MARGIN_S = 30.0
# An upload from host memory takes seconds at least.
_PUSH_POLL_S = 0.1
# Over the time that a push is given: its end is seen between two looks at storage.
PUSH_MARGIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPlan:
    """What an uploader of one job must know; a new plan replaces the old uploader."""

    url: str
    job_id: str
    memory_dir: Path
    local_ranks: tuple[int, ...]
    saver_ranks: tuple[int, ...]
    is_coordinator: bool
    timeout_s: float
    interval_steps: int
    keep: int
    keep_every_steps: int | None
    keep_best: int
    memory_bytes: int
    bytes_per_s: float | None
    last_step: int | None = None
    """The checkpoint of this step must get to storage; None: none must."""
    last_timeout_s: float = 0.0
    owner: str
    """The job's mark in its checkpoint root; empty where its controller knows of none."""
    chosen: tuple[ChosenStart, ...] = ()
    """Where persons let the job go on: what is given up is not uploaded."""


class PushError(RetryableError):
    """What host memory holds did not get to storage."""


class UploadEvents(Protocol):
    """Hears what becomes of uploads, in the event loop's thread."""

    def upload_committed(self, job_id: str, committed: Committed) -> None: ...

    def upload_found(self, job_id: str, found: CommitRecord) -> None: ...

    def upload_trouble(self, job_id: str, step: int, stage: str, detail: str) -> None: ...

    def memory_damaged(self, job_id: str, damage: Damage) -> None: ...


@dataclass(frozen=True, slots=True)
class _Active:
    """What goes on for one job."""

    plan: UploadPlan
    uploader: Uploader
    guard: Guard

    def stop(self) -> None:
        self.uploader.stop()
        # Nobody looks after it any more: whoever waits for a push must hear of that.
        self.uploader.insisting.end()
        self.guard.stop()


class Uploads:
    """The uploaders of this node."""

    def __init__(self, events: UploadEvents) -> None:
        self._events = events
        self._active: dict[str, _Active] = {}
        self._guarded = GuardCounts()
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._active)

    @property
    def guarded(self) -> GuardCounts:
        """What the guards of this node have done so far."""
        running = (active.guard.counts() for active in self._active.values())
        return sum(running, self._guarded)

    async def follow(self, plan: UploadPlan) -> None:
        """Upload by this plan from now on; it is kept beside the job's host memory."""
        active = self._active.get(plan.job_id)
        if active is not None:
            if active.plan == plan:
                active.uploader.insisting.again(plan.last_step)
                return
            await self._stop(active)
        reach(CrashPoint.PLAN_MADE)
        _keep_plan(plan)
        reach(CrashPoint.PLAN_KEPT)
        self._begin(plan)

    async def drop(self, job_id: str) -> None:
        """Stop at once to look at a job's host memory, until a plan comes for it."""
        active = self._active.pop(job_id, None)
        if active is not None:
            await self._stop(active)

    async def finish(self, job_id: str, memory_dir: Path) -> None:
        """Finish the wanted uploads of a job, then stop looking for more.

        An agent that started after the job had ended goes on where the last one was.
        """
        if job_id not in self._active:
            plan = _kept_plan(job_id, memory_dir)
            if plan is None:
                return
            self._begin(plan)
        active = self._active.pop(job_id)
        # Whatever is wanted is finished; nobody waits for what failed.
        active.uploader.insisting.end()
        try:
            # An upload and a commit give up by themselves, and say so, before this.
            drain_s = active.plan.timeout_s + DRAIN_MARGIN_S
            if not await run_blocking(lambda: active.uploader.drain(drain_s), "upload-drain"):
                logger.warning("uploads given up: job=%s not done in %.0f s", job_id, drain_s)
        finally:
            await self._stop(active)

    async def push(
        self, job_id: str, memory_dir: Path, *, url: str, owner: str, timeout_s: float
    ) -> None:
        """Upload the newest step that host memory here holds; return once it is committed.

        Raises:
            PushError: there is none, it was not committed in time, or the job goes on or ends.
        """
        active = self._active.get(job_id)
        plan = _kept_plan(job_id, memory_dir) if active is None else active.plan
        if plan is None:
            raise PushError(f"host memory here holds nothing of {job_id}")
        await self.follow(replace(plan, url=url, owner=owner or plan.owner))
        active = self._active[job_id]
        uploader, insisting = active.uploader, active.uploader.insisting
        insisting.begin(timeout_s)
        try:
            # A call to storage may hang, and then nobody looks.
            async with asyncio.timeout(timeout_s + PUSH_MARGIN_S):
                while insisting.is_active:
                    await asyncio.sleep(_PUSH_POLL_S)
        except TimeoutError as error:
            insisting.end()
            raise PushError(f"the upload did not end within {timeout_s:g} s") from error
        if self._active.get(job_id) is not active:
            raise PushError("the uploader was stopped: the job goes on, or has ended")
        if insisting.step < 0:
            raise PushError(f"host memory here holds no whole step of {job_id}")
        if not insisting.is_committed:
            why = uploader.last_trouble or "parts of other nodes did not come"
            raise PushError(f"step {insisting.step} was not committed in {timeout_s:g} s: {why}")

    async def stop(self) -> None:
        """Drop everything; what is half uploaded is never committed."""
        all_active = list(self._active.values())
        self._active.clear()
        await asyncio.gather(*(self._stop(active) for active in all_active))

    async def _stop(self, active: _Active) -> None:
        await run_blocking(active.stop, "upload-stop")
        self._guarded += active.guard.counts()

    def _begin(self, plan: UploadPlan) -> None:
        def damaged(damage: Damage) -> None:
            self._later(self._events.memory_damaged, plan.job_id, damage)

        guard = Guard(plan.job_id, plan.memory_dir, plan.local_ranks, damaged)
        active = _Active(plan, self._make(plan), guard)
        self._active[plan.job_id] = active
        guard.start()
        active.uploader.start()

    def _make(self, plan: UploadPlan) -> Uploader:
        def committed(what: Committed) -> None:
            self._later(self._events.upload_committed, plan.job_id, what)

        def found(record: CommitRecord) -> None:
            self._later(self._events.upload_found, plan.job_id, record)

        def trouble(step: int, stage: str, detail: str) -> None:
            self._later(self._events.upload_trouble, plan.job_id, step, stage, detail)

        return Uploader(
            url=plan.url,
            job_id=plan.job_id,
            memory_dir=plan.memory_dir,
            local_ranks=plan.local_ranks,
            saver_ranks=plan.saver_ranks,
            coordinator=plan.is_coordinator,
            rules=CommitRules(
                retention=RetentionPolicy(
                    keep=plan.keep,
                    spacing_steps=plan.interval_steps,
                    every_steps=plan.keep_every_steps,
                    best=plan.keep_best,
                ),
                timeout_s=plan.timeout_s,
                interval_steps=plan.interval_steps,
                last_step=plan.last_step,
                last_timeout_s=plan.last_timeout_s,
                chosen=plan.chosen,
            ),
            on_committed=committed,
            on_trouble=trouble,
            on_found=found,
            limits=TransferLimits(memory_bytes=plan.memory_bytes, bytes_per_s=plan.bytes_per_s),
            owner=Owner(job_id=plan.job_id, mark=plan.owner) if plan.owner else None,
        )

    def _later(self, tell: Callable[..., None], *arguments: object) -> None:
        # The uploader's thread may outlive the loop by a moment, when the agent ends.
        try:
            self._loop.call_soon_threadsafe(tell, *arguments)
        except RuntimeError:
            logger.debug("agent is ending; upload event dropped: %s", arguments)


def _keep_plan(plan: UploadPlan) -> None:
    plan.memory_dir.mkdir(parents=True, exist_ok=True)
    document = {**asdict(plan), "memory_dir": str(plan.memory_dir)}
    private.replace_text(plan.memory_dir / PLAN_FILE, json.dumps(document))


def _kept_plan(job_id: str, memory_dir: Path) -> UploadPlan | None:
    try:
        document = json.loads((memory_dir / PLAN_FILE).read_text())
    except FileNotFoundError:
        return None
    ranks = {name: tuple(document[name]) for name in ("local_ranks", "saver_ranks")}
    chosen = tuple(ChosenStart(**each) for each in document.get("chosen", ()))
    # What an older agent kept has no owner.
    known = {"owner": "", **document, **ranks, "chosen": chosen}
    return UploadPlan(**{**known, "memory_dir": memory_dir, "job_id": job_id})


def delete_job_memory(memory_dir: Path) -> None:
    """Free the host memory of a job that has ended."""
    shutil.rmtree(memory_dir, ignore_errors=True)
