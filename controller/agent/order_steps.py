"""How this node does each step of a command.

What comes before what, and what is given up when, `core/commands` decides.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from controller.agent.addresses import Controllers
from controller.agent.code import JobCode, delete_code
from controller.agent.config import AgentConfig
from controller.agent.core.reports import AttemptKey
from controller.agent.core.steps import StartFacts, Step
from controller.agent.diagnostics import Suites
from controller.agent.memory.rank_memory import free_copies, hand_over, stray_folders
from controller.agent.memory.replicas import ReplicaPlan, Replicas, replica_plan
from controller.agent.memory.uploads import Uploads, delete_job_memory
from controller.agent.mistakes import Mistakes
from controller.agent.observe.leftovers import delete_old_attempts, delete_old_logs
from controller.agent.threads import run_blocking
from controller.agent.workers import launch, stacks
from controller.agent.workers.data_loaders import DataLoaders
from controller.agent.workers.orphans import Orphans
from controller.agent.workers.preflight import Preflight
from controller.agent.workers.preload import preload_of
from controller.agent.workers.script_launch import as_scripts, executed, prepare
from controller.agent.workers.script_paths import in_folder
from controller.agent.workers.script_store import ScriptStore
from controller.agent.workers.script_variables import variables_here
from controller.agent.workers.supervisor import Launch, Supervisor
from diagnostics.core.orders import Order as CheckOrder
from diagnostics.core.orders import OrderKind
from outlast.crashpoints import CrashPoint, reach
from outlast.failures import ErrorKind
from outlast.spec import JobSpec
from outlast.v1 import agents_pb2, diagnostics_pb2


@dataclass(slots=True, kw_only=True)
class Order:
    """A command under way, with what its steps hand on to each other and to its answer."""

    command: agents_pb2.Command
    received_ns: int
    spec: JobSpec | None = None
    device: str = ""
    copies: ReplicaPlan | None = None
    shares_data: bool = False
    launches: list[Launch] = field(default_factory=list)
    # Told once and not kept.
    findings: tuple[diagnostics_pb2.Finding, ...] = ()
    stacks: tuple[agents_pb2.RankStacks, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the steps of commands work with."""

    config: AgentConfig
    controllers: Controllers
    supervisor: Supervisor
    orphans: Orphans
    uploads: Uploads
    replicas: Replicas
    suites: Suites
    rendezvous_fd: int
    store: ScriptStore
    data_loaders: DataLoaders
    # A job's start waits for its storage, and why.
    storage_awaited: Callable[[str, str], None]
    mistakes: Mistakes


class OrderSteps:
    """Does the steps of commands; whatever one raises is why it failed."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._code = JobCode(parts.config, parts.controllers)
        self._preflight = Preflight(
            parts.config.limits.probe_s, parts.storage_awaited, data_dir=parts.config.data_dir
        )

    async def run(self, order: Order, step: Step) -> StartFacts | None:
        """Do a step; what it found that other steps depend on. Cancelling this gives it up."""
        match step:
            case Step.PREFLIGHT:
                return await self._preflight_of(order)
            case Step.CHECK:
                self._check(order)
            case Step.STACKS:
                await self._collect_stacks(order)
            case Step.HAND_OVER:
                await self._hand_over(order)
            case Step.FOLDERS:
                self._make_folders(order)
            case Step.KEEP_COPIES:
                assert order.copies is not None
                await self._parts.replicas.begin(order.copies)
            case Step.FREE_COPIES:
                await self._free_copies(order)
            case Step.FORK:
                await self._fork(order)
            case Step.CLEAN_UP:
                await self._clean_up(order)
            case Step.DRAIN:
                await self._drain(order)
            case Step.FREE:
                await self._free(order)
            case Step.SUITE:
                await self._run_suite(order)
            case Step.PUSH:
                await self._push(order)
            case Step.ASK | Step.KILL | Step.LEFTOVERS | Step.DATA_LOADER | Step.FORGET_WORKERS:
                raise AssertionError(f"{step.value} is no step of an order")
        return None

    def _check(self, order: Order) -> None:
        command, config = order.command, self._parts.config
        launch.check_job_id(command.job_id)
        if command.WhichOneof("kind") != "start_workers":
            return
        start = command.start_workers
        order.spec = launch.read_spec(start.spec_json)
        if len(start.ranks) > config.workers:
            raise launch.StartRefusedError(
                ErrorKind.MISFIT,
                f"{len(start.ranks)} workers asked of a node that has room for {config.workers}",
            )

    async def _collect_stacks(self, order: Order) -> None:
        command = order.command
        workers = (
            worker
            for worker in self._parts.supervisor.running()
            if worker.job_id == command.job_id and worker.pid is not None
        )
        # The time to stop in covers both: a node is not to be blamed for looking long.
        within_s = min(stacks.DEADLINE_S, command.stop_workers.timeout_s)
        order.stacks = tuple(await stacks.collect(workers, within_s=within_s))

    async def _preflight_of(self, order: Order) -> StartFacts:
        command, spec, config = order.command, order.spec, self._parts.config
        assert spec is not None
        ranks = command.start_workers.ranks
        order.device = launch.choose_device(spec, len(ranks))
        if spec.is_script:
            # What it will keep in host memory is known when its session makes room for it.
            order.spec = await self._script_here(command.job_id, spec)
        else:
            launch.check_host_memory(config, command.job_id, spec, command.start_workers)
            await self._preflight.check(command, spec)
        order.copies = replica_plan(config, command, spec)
        strays = stray_folders(config.job_memory_dir(command.job_id), ranks)
        order.shares_data = launch.shares_data(spec, ranks)
        return StartFacts(
            has_strays=bool(strays),
            keeps_copies=order.copies is not None,
            shares_data=order.shares_data,
        )

    async def _script_here(self, job_id: str, spec: JobSpec) -> JobSpec:
        """The spec of a script with its code and its secrets where they are on this node."""
        digest = spec.workload.code.digest
        if digest is not None:
            spec = in_folder(spec, await self._code.ready(job_id, digest))

        state_dir, within_s = self._parts.config.state_dir, self._parts.config.limits.probe_s
        found = await variables_here(spec, os.environ, within_s=within_s)
        await run_blocking(lambda: prepare(found, state_dir), "script preflight")
        return found

    async def _hand_over(self, order: Order) -> None:
        parts, job_id = self._parts, order.command.job_id
        memory_dir, ranks = parts.config.job_memory_dir(job_id), order.command.start_workers.ranks
        await parts.replicas.finish(job_id)
        await parts.uploads.drop(job_id)
        await run_blocking(lambda: hand_over(memory_dir, ranks), "hand-over")

    def _make_folders(self, order: Order) -> None:
        assert order.spec is not None
        launches = launch.make_launches(
            self._parts.config,
            order.command,
            device=order.device,
            rendezvous_fd=self._parts.rendezvous_fd,
            requested_ns=order.received_ns,
            agent_line=self._parts.supervisor.lines.address,
        )
        if order.spec.is_script:
            launches = as_scripts(
                launches,
                order.spec,
                order.command.start_workers,
                state_dir=self._parts.config.state_dir,
            )
        if order.shares_data:
            command = order.command
            path = self._parts.data_loaders.prepare(
                AttemptKey(command.job_id, command.attempt),
                self._parts.config.attempt_dir(command.job_id, command.attempt),
                command.start_workers.spec_json,
            )
            launches = [
                replace(each, contract=replace(each.contract, data_socket=path))
                for each in launches
            ]
        order.launches = launches

    async def _free_copies(self, order: Order) -> None:
        parts, job_id = self._parts, order.command.job_id
        await parts.replicas.finish(job_id)
        memory_dir = parts.config.job_memory_dir(job_id)
        await run_blocking(lambda: free_copies(memory_dir), "free-copies")

    async def _clean_up(self, order: Order) -> None:
        config, command = self._parts.config, order.command
        assert order.spec is not None
        job_dir = config.attempt_dir(command.job_id, command.attempt).parent
        await run_blocking(lambda: delete_old_attempts(job_dir), "delete-old-attempts")
        await self._parts.uploads.follow(launch.upload_plan(config, command, order.spec))

    async def _fork(self, order: Order) -> None:
        command = order.command
        assert order.spec is not None
        preload = preload_of(order.spec, sys.executable, self._parts.config.state_dir)
        reason = await self._parts.supervisor.prepare(command.job_id, preload)
        if reason:
            order.launches = executed(order.launches, reason)
        if order.spec.is_script and 0 in command.start_workers.ranks:
            await self._parts.store.start(command.job_id)
        await self._parts.supervisor.start(order.launches)

    async def end_leftovers(self, order: Order | None) -> None:
        """Wait for the ends of what workers left, with the store that they met at.

        Nobody ordered the agent's own stops; what these leave ends with the next start.
        """
        await self._parts.supervisor.wait_for_families()
        # What has left its worker's group, too: it may hold a device or a port.
        await self._parts.orphans.end(self._parts.config.limits.kill_s)
        if order is not None:
            await self._parts.store.end_of(order.command.job_id)

    async def _run_suite(self, order: Order) -> None:
        suite = order.command.run_suite
        check = CheckOrder(
            kind=OrderKind.SUITE,
            suite=suite.suite,
            deadline_s=suite.timeout_s,
            checkpoint_url=suite.checkpoint_url,
        )
        order.findings = tuple(await self._parts.suites.run(check))

    async def _drain(self, order: Order) -> None:
        parts, job_id = self._parts, order.command.job_id
        await parts.replicas.finish(job_id)
        reach(CrashPoint.JOB_FORGOTTEN)
        await parts.uploads.finish(job_id, parts.config.job_memory_dir(job_id))
        reach(CrashPoint.UPLOADS_DRAINED)

    async def _free(self, order: Order) -> None:
        config, job_id = self._parts.config, order.command.job_id
        folder = config.job_memory_dir(job_id)
        self._parts.supervisor.drop_preload(job_id)
        self._parts.data_loaders.end_of(job_id)

        def free() -> None:
            delete_job_memory(folder)
            delete_code(config.code_dir, job_id)
            reach(CrashPoint.MEMORY_FREED)
            delete_old_logs(config.jobs_dir, config.memory_dir, newest=job_id)

        await run_blocking(free, "free-memory")

    async def _push(self, order: Order) -> None:
        push, job_id = order.command.push_checkpoint, order.command.job_id
        await self._parts.uploads.push(
            job_id,
            self._parts.config.job_memory_dir(job_id),
            url=push.checkpoint_url,
            owner=push.owner,
            timeout_s=push.timeout_s,
        )
