"""Starts, watches and signals the workers of one node.

The standby process forks workers and reaps them; the agent holds a pidfd of
each. A worker's end is known as soon as its wait status is: from the standby,
or, when the standby is dead or stuck, from the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

from controller.agent.config import Limits
from controller.agent.core.workers import WorkerKey, taken_over
from controller.agent.mistakes import Mistakes
from controller.agent.observe.oom import OomKills
from controller.agent.workers.cgroups import WorkerCgroups
from controller.agent.workers.lines import WorkerLines
from controller.agent.workers.preload import NOTHING, Preload, preload_of_trainer
from controller.agent.workers.processes import (
    child_pids,
    kill_stray,
    reap,
    reap_group,
    zombie_status,
)
from controller.agent.workers.standby_events import StandbyError
from controller.agent.workers.standby_link import StandbyLink
from controller.agent.workers.worker import Worker, bare_exit, post_mortem, signal_and_wait
from controller.agent.workers.worker_events import WorkerEvents
from outlast.blackbox.records import MAX_COUNT
from outlast.clock import node_time_ns
from outlast.v1 import agents_pb2
from outlast.worker_contract import KILLED, STOP_SIGNAL, WorkerContract, WorkerExitCode, WorkerFiles
from outlast.worker_line import Join, Leave, Left

logger = logging.getLogger(__name__)

# The standby reaps within a millisecond; one that has not said how a worker ended by
# then is dead or stopped.
STATUS_GRACE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One worker to start."""

    contract: WorkerContract
    paths: WorkerFiles
    requested_ns: int
    stage: int = 0
    """Of the pipeline."""
    total_steps: int = MAX_COUNT
    stop_signal: signal.Signals = STOP_SIGNAL
    silent_limit_s: float | None = None
    """As `Worker` has them."""


class Supervisor:
    """The workers of this node, alive and dead, until their job is forgotten."""

    def __init__(
        self,
        *,
        limits: Limits,
        standby: StandbyLink,
        events: WorkerEvents,
        oom_kills: OomKills,
        cgroups: WorkerCgroups,
        mistakes: Mistakes,
    ) -> None:
        self.lines = WorkerLines(self.has_left, mistakes)
        self._limits = limits
        self._standby = standby
        self._events = events
        self._oom_kills = oom_kills
        self._cgroups = cgroups
        self._mistakes = mistakes
        self._workers: dict[str, Worker] = {}
        # Whose imports the standby process has.
        self._preloaded_job = ""
        # Ends of what workers left in their cgroups and process groups.
        self._families: set[asyncio.Task[None]] = set()

    def workers(self) -> list[Worker]:
        """All that are known, in the order of their starts."""
        return list(self._workers.values())

    def running(self) -> list[Worker]:
        """Those that have not ended."""
        return [worker for worker in self._workers.values() if worker.is_running]

    def with_process(self) -> list[Worker]:
        """Those that have not ended, and those that have left their attempt and live on."""
        return [worker for worker in self._workers.values() if worker.has_process]

    def statuses(self) -> list[agents_pb2.WorkerStatus]:
        """What is true now, for a controller that may have missed how it came about."""
        return [
            agents_pb2.WorkerStatus(
                job_id=worker.job_id,
                attempt=worker.attempt,
                rank=worker.rank,
                running=worker.is_running,
                exit=worker.exit,
            )
            for worker in self._workers.values()
        ]

    async def prepare(self, job_id: str, preload: Preload) -> str:
        """Have what a job imports before the fork imported; "", or why it cannot be shared.

        Raises:
            StandbyError: there is no standby process at all, in time.
        """
        reason = ""
        self._preloaded_job = job_id
        self._standby.use(preload)
        try:
            await self._standby.wait_ready(self._limits.standby_ready_s)
        except StandbyError as error:
            if not preload.python:
                raise
            # An interpreter of the user's may be too old, for one.
            logger.warning("the interpreter %s runs no standby process: %s", preload.python, error)
            reason = str(error)
            self._standby.use(NOTHING)
            await self._standby.wait_ready(self._limits.standby_ready_s)
        return reason

    def drop_preload(self, job_id: str) -> None:
        """The job is over: no process keeps its own code, and the variables that it may read.

        Imports of installed packages stay, until another job needs others: one that is like it
        starts at once.
        """
        # Another job may have begun here meanwhile.
        if self._preloaded_job == job_id and self._standby.is_of_one_job:
            self._standby.use(preload_of_trainer())

    async def start(self, launches: Iterable[Launch]) -> None:
        """Fork all of these workers; all or none.

        Raises:
            StandbyError: one could not be forked; the others are killed again.
        """
        await self._standby.wait_ready(self._limits.standby_ready_s)
        await self.lines.start()
        loop = asyncio.get_running_loop()
        pairs = [
            (
                Worker(
                    job_id=launch.contract.job_id,
                    attempt=launch.contract.attempt,
                    rank=launch.contract.rank,
                    paths=launch.paths,
                    requested_ns=launch.requested_ns,
                    gone=loop.create_future(),
                    mistakes=self._mistakes,
                    stage=launch.stage,
                    total_steps=launch.total_steps,
                    stop_signal=launch.stop_signal,
                    silent_limit_s=launch.silent_limit_s,
                ),
                launch,
            )
            for launch in launches
        ]
        for worker, _ in pairs:
            self._workers[worker.key] = worker
        self._events.requested([worker for worker, _ in pairs])
        # A stop may cancel the command while forks are under way; they finish, and the
        # stop waits for the end of what they made.
        await asyncio.shield(asyncio.ensure_future(self._fork_all(pairs)))

    def signal(self, keys: Iterable[WorkerKey], number: signal.Signals) -> None:
        """Signal those of these workers that run, now or as soon as there is a process."""
        for worker in self._named(keys):
            if worker.has_process:
                worker.signal(worker.stop_signal if number is STOP_SIGNAL else number)

    def ask_to_leave(self, keys: Iterable[WorkerKey], *, after_step: bool) -> None:
        """Have these workers leave their attempt and live on; `exited` comes when they have."""
        for worker in self._named(keys):
            if worker.is_running:
                leave = Leave(worker.attempt, after_step)
                if worker.pid is None or not self.lines.say(worker.pid, leave):
                    worker.signal(worker.stop_signal if after_step else signal.SIGKILL)
                # As it ends then, it does because it was told to.
                worker.stopped_by = worker.stopped_by or STOP_SIGNAL

    def has_left(self, pid: int, left: Left) -> None:
        """A process has no part in an attempt any more."""
        for worker in self.running():
            if (worker.pid, worker.attempt) == (pid, left.attempt):
                stopped = left.completed or worker.stopped_by
                code = WorkerExitCode.STOPPED if stopped else WorkerExitCode.FAILED
                self._over(worker, code, is_kept=True)

    async def wait_for_families(self) -> None:
        """Wait for the ends of what dead workers left: it may hold a device or a port."""
        if self._families:
            await asyncio.wait(self._families, timeout=self._limits.kill_s)

    async def stop_all(self) -> None:
        """SIGKILL everything, for the end of the agent."""
        await signal_and_wait(self.with_process(), signal.SIGKILL, self._limits.shutdown_s)
        self.lines.close()
        if self._families:
            await asyncio.wait(self._families, timeout=self._limits.shutdown_s)

    def forget(self, keys: Iterable[WorkerKey]) -> None:
        """Drop these dead workers."""
        for worker in self._named(keys):
            worker.close()
            del self._workers[worker.key]

    def standby_died(self, other_pids: set[int]) -> None:
        """Kill workers that a standby forked and could not name before it died.

        They are our children now, as its orphans; all our others are known.
        """
        known = other_pids | {one.pid for one in self.with_process() if one.pid is not None}
        for pid in child_pids():
            if pid not in known:
                logger.warning("killing an unknown worker of a dead standby: pid=%d", pid)
                kill_stray(pid)

    def worker_exited(self, key: str, status: int) -> None:
        """The standby process reaped a worker."""
        for worker in self.with_process():
            if worker.fork_key == key:
                self._ended(worker, os.waitstatus_to_exitcode(status))

    def find(self, key: WorkerKey) -> Worker | None:
        """A worker that is not forgotten; None where there is none."""
        return next(iter(self._named((key,))), None)

    def _named(self, keys: Iterable[WorkerKey]) -> list[Worker]:
        wanted = set(keys)
        return [worker for worker in self._workers.values() if worker.identity in wanted]

    async def _fork_all(self, pairs: list[tuple[Worker, Launch]]) -> None:
        kept = (worker.identity for worker in self._workers.values() if worker.is_kept)
        taken = taken_over(kept, [worker.identity for worker, _ in pairs])
        forks = [self._fork(each, launch, taken.get(each.identity)) for each, launch in pairs]
        results = await asyncio.gather(*forks, return_exceptions=True)
        self._events.changed()
        failures = [result for result in results if isinstance(result, BaseException)]
        if not failures:
            return
        await signal_and_wait([one for one, _ in pairs], signal.SIGKILL, self._limits.kill_s)
        raise failures[0]

    async def _fork(self, worker: Worker, launch: Launch, taken: WorkerKey | None) -> None:
        kept = None if taken is None else self.find(taken)
        if kept is not None and self._join(worker, launch, kept):
            return
        worker.cgroup, worker.fork_key = self._cgroups.make(), worker.key
        try:
            forked = await self._standby.fork(worker.key, launch.contract, cgroup=worker.cgroup)
        except StandbyError:
            # It may have forked all the same, and died before it said so.
            self._end_family(worker)
            worker.close()
            del self._workers[worker.key]
            worker.gone.set_result(None)
            self._events.not_forked(worker)
            raise
        worker.forked_ns = forked.at_ns
        # A worker that ended at once may be reaped by now; its status has come or will come.
        if worker.is_running and self._take_hold(worker, forked.pid):
            assert worker.pidfd is not None
            self._oom_kills.began(worker.key, forked.pid)
            loop = asyncio.get_running_loop()
            loop.add_reader(worker.pidfd, self._process_ended, worker)
        self._events.forked(worker)
        logger.info("worker started: worker=%s pid=%d", worker.key, forked.pid)

    def _join(self, worker: Worker, launch: Launch, kept: Worker) -> bool:
        """Have the process of one that has left an older attempt take part; False: it cannot."""
        if kept.pid is None or (pidfd := kept.pidfd) is None:
            return False
        if not self.lines.say(kept.pid, Join(launch.contract)):
            kept.signal(signal.SIGKILL)
            return False
        worker.take_over(kept)
        worker.forked_ns = node_time_ns()
        # In the place of the reader that it had.
        asyncio.get_running_loop().add_reader(pidfd, self._process_ended, worker)
        self._oom_kills.began(worker.key, kept.pid)
        self._events.kept_ended(kept)
        self._events.forked(worker)
        logger.info("worker joined: worker=%s pid=%d", worker.key, kept.pid)
        return True

    def _take_hold(self, worker: Worker, pid: int) -> bool:
        try:
            return worker.open_pidfd(pid)
        except OSError as error:
            # It could not be stopped later. The standby reaps it, and says so.
            worker.stopped_by = signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            raise StandbyError(f"worker {worker.key}: cannot be watched: {error}") from error

    def _process_ended(self, worker: Worker) -> None:
        assert worker.pidfd is not None
        assert worker.pid is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.pidfd)
        # Ours to reap when its standby process is dead.
        status = reap(worker.pid)
        if status is not None:
            self._ended(worker, os.waitstatus_to_exitcode(status))
        else:
            loop.call_later(STATUS_GRACE_S, self._ended_unreported, worker)

    def _ended_unreported(self, worker: Worker) -> None:
        """The process is gone and the standby has not said how: find out otherwise."""
        if not worker.has_process:
            return
        assert worker.pid is not None
        status = reap(worker.pid)
        if status is None:
            status = zombie_status(worker.pid)
        if status is None:
            # Reaped by a standby that died before it could tell. It left an error report
            # or was killed.
            failed = WorkerExitCode.FAILED << 8
            status = failed if worker.paths.error.exists() else int(signal.SIGKILL)
        self._ended(worker, os.waitstatus_to_exitcode(status))

    def _ended(self, worker: Worker, code: int) -> None:
        if not worker.has_process:
            return
        if worker.pidfd is not None:
            asyncio.get_running_loop().remove_reader(worker.pidfd)
        if worker.is_running:
            self._over(worker, code)
            return
        worker.is_kept = False
        self._end_family(worker)
        worker.close()
        logger.info("kept worker ended: worker=%s pid=%s code=%d", worker.key, worker.pid, code)
        self._events.kept_ended(worker)

    def _over(self, worker: Worker, code: int, *, is_kept: bool = False) -> None:
        """A worker has ended, or left its attempt while its process lives."""
        worker.is_kept = is_kept
        worker.exit = bare_exit(worker, code)
        try:
            worker.exit = self._post_mortem(worker, code)
        except Exception as error:  # noqa: BLE001  # its end is known, whatever it left behind
            self._mistakes.note("post-mortem", worker.key, error)
        finally:
            # Whoever stops or replaces it waits for this and for nothing else.
            worker.gone.set_result(None)
            if not is_kept:
                self._end_family(worker)
        logger.info(
            "worker ended: worker=%s pid=%s code=%d step=%d signalled=%s after_s=%.1f",
            worker.key,
            worker.pid,
            code,
            worker.exit.completed_step,
            worker.stopped_by.name if worker.stopped_by else "no",
            (node_time_ns() - worker.forked_ns) / 1e9,
        )
        try:
            self._events.exited(worker)
        finally:
            worker.close(with_process=not is_kept)

    def _end_family(self, worker: Worker) -> None:
        ends = [] if worker.cgroup is None else [self._cgroups.end(worker.cgroup)]
        if worker.pid is not None:
            ends.append(reap_group(worker.pid))
        for end in ends:
            task = asyncio.create_task(end, name=f"family-{worker.key}")
            self._families.add(task)
            task.add_done_callback(self._families.discard)

    def _post_mortem(self, worker: Worker, code: int) -> agents_pb2.WorkerExit:
        was_killed = code == KILLED and worker.stopped_by is not signal.SIGKILL
        return post_mortem(
            worker,
            code,
            out_of_memory=self._oom_kills.ended(worker.key, was_killed=was_killed),
            max_text_bytes=self._limits.max_text_bytes,
            stderr_tail_bytes=self._limits.stderr_tail_bytes,
        )
