"""Carries out the controller's commands, each at most once.

Every command is a task of its own, so that a stop is never behind a start that
waits for something. The ledger decides what runs; its decision is on disk before
workers start. What ends something is done even where the disk is full: if the agent
dies, the workers that it was about die too. The answer to a command is an event,
kept until acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from controller.agent import launch, stacks
from controller.agent.config import AgentConfig
from controller.agent.diagnostics import SuiteError, Suites
from controller.agent.ledger import (
    CommandKind,
    CommandLedger,
    Decision,
    Result,
    Weight,
)
from controller.agent.leftovers import delete_old_attempts, delete_old_logs
from controller.agent.preflight import Preflight
from controller.agent.rank_memory import free_copies, hand_over, stray_folders
from controller.agent.replicas import Replicas, replica_plan
from controller.agent.reporter import Emit
from controller.agent.standby_link import StandbyError
from controller.agent.supervisor import Supervisor, WorkersStayError
from controller.agent.threads import run_blocking
from controller.agent.uploads import PushError, Uploads, delete_job_memory
from diagnostics.core.orders import Order, OrderKind
from outlast.clock import node_time_ns, node_time_s
from outlast.crashpoints import CrashPoint, reach
from outlast.errors import RetryableError
from outlast.failures import ErrorKind
from outlast.v1 import agents_pb2, diagnostics_pb2

logger = logging.getLogger(__name__)

_FORGET_TRIES = 3
_FORGET_PAUSE_S = 1.0
_KINDS = {
    "start_workers": CommandKind.START,
    "stop_workers": CommandKind.STOP,
    "run_suite": CommandKind.SUITE,
    "forget_job": CommandKind.FORGET,
    "push_checkpoint": CommandKind.PUSH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a command, with what is told once and not kept."""

    result: Result
    findings: tuple[diagnostics_pb2.Finding, ...] = ()
    stacks: tuple[agents_pb2.RankStacks, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Running:
    """A command under way."""

    kind: CommandKind
    job_id: str
    attempt: int
    # A task that is cancelled before its first step never takes one, and nobody would answer.
    has_begun: bool = False
    is_overtaken: bool = False
    task: asyncio.Task[None] | None = field(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What commands work with."""

    config: AgentConfig
    supervisor: Supervisor
    uploads: Uploads
    replicas: Replicas
    suites: Suites
    rendezvous_fd: int
    emit: Emit
    # A job's start waits for its storage, and why.
    storage_awaited: Callable[[str, str], None]
    save_ledger: Callable[[CommandLedger], None]


class Commands:
    """Applies commands and answers them."""

    def __init__(self, parts: Parts, ledger: CommandLedger) -> None:
        self._parts = parts
        self._ledger = ledger
        self._running: dict[str, _Running] = {}
        self._preflight = Preflight(parts.config.limits.probe_s, parts.storage_awaited)
        self._is_closing = False

    def receive(self, command: agents_pb2.Command) -> None:
        """Take a command from the controller, be it new, repeated or stale."""
        received_ns = node_time_ns()
        kind = _KINDS.get(command.WhichOneof("kind") or "")
        if kind is None:
            logger.error("command %s: of a kind that this agent does not know", command.command_id)
            refused = Result(
                ok=False,
                detail="the agent is older than the controller and does not know this command",
                error_kind=ErrorKind.INTERNAL,
            )
            self._answer(command, Outcome(result=refused))
            return
        admission = self._ledger.admit(command.command_id, kind, command.job_id, command.attempt)
        match admission.decision:
            case Decision.RUN:
                if self._save_ledger() or kind is not CommandKind.START:
                    self._begin(command, kind, received_ns)
                    return
                refused = Result(
                    ok=False,
                    detail=f"cannot write to {self._parts.config.state_dir}: is its disk full?",
                    error_kind=ErrorKind.RESOURCE,
                )
                self._ledger.finish(command.command_id, refused)
                self._answer(command, Outcome(result=refused))
            case Decision.RUNNING:
                logger.debug("command %s: still running", command.command_id)
            case Decision.ANSWERED | Decision.STALE:
                assert admission.result is not None
                self._answer(command, Outcome(result=admission.result))

    def abandon(self) -> None:
        """Stop every job's workers: there has been no controller for too long."""
        newest: dict[str, int] = {}
        attempts = [(w.job_id, w.attempt) for w in self._parts.supervisor.running()]
        attempts += [
            (running.job_id, running.attempt)
            for running in self._running.values()
            if running.kind is CommandKind.START
        ]
        for job_id, attempt in attempts:
            newest[job_id] = max(newest.get(job_id, 0), attempt)
        for job_id, attempt in newest.items():
            self._ledger.stop_attempt(job_id, attempt)
            self._cancel_overtaken(job_id, attempt)
            stop = self._parts.supervisor.stop(
                job_id,
                attempt,
                graceful=True,
                timeout_s=self._parts.config.limits.absence_stop_s,
            )
            running = _Running(kind=CommandKind.STOP, job_id=job_id, attempt=attempt)
            command_id = f"abandon-{job_id}-{attempt}"
            self._running[command_id] = running
            running.task = asyncio.create_task(self._abandon(command_id, stop))
        self._save_ledger()

    def newest_attempt(self, job_id: str) -> int:
        """The newest attempt of the job that was started here; 0 when none was."""
        return self._ledger.fence(job_id).started

    async def close(self) -> None:
        """Drop whatever is under way."""
        self._is_closing = True
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _abandon(self, command_id: str, stop: Coroutine[None, None, int]) -> None:
        try:
            await stop
        except WorkersStayError as error:
            logger.error("%s", error)
        finally:
            del self._running[command_id]

    def _save_ledger(self) -> bool:
        """Keep the ledger; whether that could be done. A full disk must not end the agent."""
        try:
            self._parts.save_ledger(self._ledger)
        except OSError as error:
            logger.error("commands are not kept over a restart of this agent: %s", error)
            return False
        return True

    def _begin(self, command: agents_pb2.Command, kind: CommandKind, received_ns: int) -> None:
        if kind in (CommandKind.STOP, CommandKind.FORGET):
            self._cancel_overtaken(command.job_id, command.attempt)
        running = _Running(kind=kind, job_id=command.job_id, attempt=command.attempt)
        self._running[command.command_id] = running
        running.task = asyncio.create_task(
            self._run(command, running, received_ns),
            name=f"command-{command.command_id}",
        )

    def _work(
        self, command: agents_pb2.Command, kind: CommandKind, received_ns: int
    ) -> Coroutine[None, None, Outcome]:
        match kind:
            case CommandKind.START:
                return self._start(command, received_ns)
            case CommandKind.STOP:
                return self._stop(command)
            case CommandKind.SUITE:
                return self._run_suite(command)
            case CommandKind.FORGET:
                return self._forget(command)
            case CommandKind.PUSH:
                return self._push(command)

    def _cancel_overtaken(self, job_id: str, attempt: int) -> None:
        """A stop ends starts and suites of its attempt that are still under way."""
        for running in self._running.values():
            if (
                running.kind in (CommandKind.START, CommandKind.SUITE)
                and running.job_id == job_id
                and running.attempt <= attempt
                and running.task is not None
            ):
                running.is_overtaken = True
                if running.has_begun:
                    running.task.cancel()

    async def _run(self, command: agents_pb2.Command, running: _Running, received_ns: int) -> None:
        running.has_begun = True
        try:
            if running.is_overtaken:
                outcome = _overtaken(command)
            else:
                outcome = await self._work(command, running.kind, received_ns)
        except asyncio.CancelledError:
            fence = self._ledger.fence(command.job_id)
            if self._is_closing or fence.stopped < command.attempt:
                # The agent itself is ending: there is nobody to answer to, and the next
                # one must do what this one did not.
                raise
            outcome = _overtaken(command)
        except launch.StartRefusedError as error:
            outcome = _failed(error.kind, str(error))
        except PushError as error:
            outcome = _failed(ErrorKind.RESOURCE, str(error))
        except (StandbyError, WorkersStayError, SuiteError) as error:
            outcome = _failed(ErrorKind.INTERNAL, str(error))
        except OSError as error:
            outcome = _failed(ErrorKind.RESOURCE, str(error))
        except Exception as error:
            # Our own mistake: the controller must hear of it, or it would wait for ever.
            logger.exception("command %s failed", command.command_id)
            outcome = _failed(ErrorKind.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            del self._running[command.command_id]
        self._ledger.finish(command.command_id, outcome.result)
        self._save_ledger()
        self._answer(command, outcome)

    async def _start(self, command: agents_pb2.Command, received_ns: int) -> Outcome:
        parts, start = self._parts, command.start_workers
        config = parts.config
        launch.check_job_id(command.job_id)
        spec = launch.read_spec(start.spec_json)
        if len(start.ranks) > config.workers:
            raise launch.StartRefusedError(
                ErrorKind.MISFIT,
                f"{len(start.ranks)} workers asked of a node that has room for {config.workers}",
            )
        # The controller stops an attempt before it starts the next; a stop that was lost
        # must not leave two attempts side by side.
        await parts.supervisor.stop(
            command.job_id, command.attempt - 1, graceful=False, timeout_s=0.0
        )
        device = launch.choose_device(spec, len(start.ranks))
        launch.check_host_memory(config, command.job_id, spec, start.ranks)
        await self._preflight.check(command, spec)
        memory_dir = config.job_memory_dir(command.job_id)
        if stray_folders(memory_dir, start.ranks):
            await parts.replicas.finish(command.job_id)
            await parts.uploads.drop(command.job_id)
            await run_blocking(lambda: hand_over(memory_dir, start.ranks), "hand-over")
        launches = launch.make_launches(
            config,
            command,
            device=device,
            rendezvous_fd=parts.rendezvous_fd,
            requested_ns=received_ns,
        )
        plan = replica_plan(config, command, spec)
        if plan is not None:
            await parts.replicas.begin(plan)
        else:
            # A smaller size may have nobody to bring copies to.
            await parts.replicas.finish(command.job_id)
            await run_blocking(lambda: free_copies(memory_dir), "free-copies")
        await parts.supervisor.start(launches)
        parts.supervisor.forget(command.job_id, below_attempt=command.attempt)
        job_dir = config.attempt_dir(command.job_id, command.attempt).parent
        await run_blocking(lambda: delete_old_attempts(job_dir), "delete-old-attempts")
        await parts.uploads.follow(launch.upload_plan(config, command, spec))
        return Outcome(result=Result(ok=True))

    async def _stop(self, command: agents_pb2.Command) -> Outcome:
        stop = command.stop_workers
        found: list[agents_pb2.RankStacks] = []
        if stop.look_first:
            workers = (
                worker
                for worker in self._parts.supervisor.running()
                if worker.job_id == command.job_id and worker.pid is not None
            )
            # The time to stop in covers both: a node is not to be blamed for looking long.
            within_s = min(stacks.DEADLINE_S, stop.timeout_s)
            found = await stacks.collect(workers, within_s=within_s)
        completed_step = await self._parts.supervisor.stop(
            command.job_id, command.attempt, graceful=stop.graceful, timeout_s=stop.timeout_s
        )
        result = Result(ok=True, completed_step=completed_step)
        return Outcome(result=result, stacks=tuple(found))

    async def _run_suite(self, command: agents_pb2.Command) -> Outcome:
        suite = command.run_suite
        order = Order(
            kind=OrderKind.SUITE,
            suite=suite.suite,
            deadline_s=suite.timeout_s,
            checkpoint_url=suite.checkpoint_url,
        )
        findings = await self._parts.suites.run(order)
        return Outcome(result=Result(ok=True), findings=tuple(findings))

    async def _forget(self, command: agents_pb2.Command) -> Outcome:
        """Free what a job holds here; nobody asks again soon, so what fails is tried again."""
        launch.check_job_id(command.job_id)
        for is_last in (*(False,) * (_FORGET_TRIES - 1), True):
            try:
                return await self._forget_once(command)
            except (OSError, RetryableError) as error:
                if is_last:
                    raise
                logger.warning("job %s is not forgotten yet: %s", command.job_id, error)
                await asyncio.sleep(_FORGET_PAUSE_S)
        raise AssertionError("the loop returns or raises")

    async def _forget_once(self, command: agents_pb2.Command) -> Outcome:
        parts, job_id = self._parts, command.job_id
        await parts.supervisor.stop(job_id, command.attempt, graceful=False, timeout_s=0.0)
        folder = parts.config.job_memory_dir(job_id)
        await parts.replicas.finish(job_id)
        reach(CrashPoint.JOB_FORGOTTEN)
        await parts.uploads.finish(job_id, folder)
        reach(CrashPoint.UPLOADS_DRAINED)
        parts.supervisor.forget(job_id)

        def free() -> None:
            delete_job_memory(folder)
            reach(CrashPoint.MEMORY_FREED)
            delete_old_logs(parts.config.jobs_dir, parts.config.memory_dir, newest=job_id)

        await run_blocking(free, "free-memory")
        return Outcome(result=Result(ok=True))

    async def _push(self, command: agents_pb2.Command) -> Outcome:
        push = command.push_checkpoint
        launch.check_job_id(command.job_id)
        await self._parts.uploads.push(
            command.job_id,
            self._parts.config.job_memory_dir(command.job_id),
            url=push.checkpoint_url,
            owner=push.owner,
            timeout_s=push.timeout_s,
        )
        return Outcome(result=Result(ok=True))

    def _answer(self, command: agents_pb2.Command, outcome: Outcome) -> None:
        result = outcome.result
        if not result.ok:
            logger.warning(
                "command refused or failed: command=%s job=%s attempt=%d kind=%s %s",
                command.command_id,
                command.job_id,
                command.attempt,
                result.error_kind.value,
                result.detail,
            )
        event = agents_pb2.AgentEvent(
            job_id=command.job_id,
            attempt=command.attempt,
            at_s=node_time_s(),
            command_result=agents_pb2.CommandResult(
                command_id=command.command_id,
                ok=result.ok,
                detail=result.detail,
                completed_step=result.completed_step,
                findings=outcome.findings,
                error_kind=result.error_kind.value,
                stacks=outcome.stacks,
            ),
        )
        self._parts.emit(event, Weight.LASTING)


def _overtaken(command: agents_pb2.Command) -> Outcome:
    return _failed(
        ErrorKind.STALE,
        f"job {command.job_id} attempt {command.attempt}: stopped before this was done",
    )


def _failed(kind: ErrorKind, detail: str) -> Outcome:
    return Outcome(result=Result(ok=False, detail=detail, error_kind=kind))
