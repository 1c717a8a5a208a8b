"""The node agent: its parts, and what flows between them.

    controller <-- session --> commands --> supervisor --> standby process --> workers
                     ^                          |
                     +--- event buffer <--- reporter, uploads

It imports no torch, so that it stays small and starts fast, and it does nothing
that could take long in its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Iterator
from random import Random

import outlast
from controller.agent.addresses import Controllers
from controller.agent.checkpoint_reports import CheckpointReports
from controller.agent.checks import CheckOrders
from controller.agent.commands import Commands
from controller.agent.config import AgentConfig
from controller.agent.core.buffer import EventBuffer, Weight
from controller.agent.core.commands import CommandLimits
from controller.agent.core.machine import AgentMachine
from controller.agent.diagnostics import SuitePlace, Suites
from controller.agent.memory.ending import end_copies
from controller.agent.memory.replicas import Replicas
from controller.agent.memory.uploads import Uploads
from controller.agent.mistakes import Mistakes, keep_running
from controller.agent.observe.capacity import NodeCapacity
from controller.agent.observe.host import Host
from controller.agent.observe.leftovers import left_steps
from controller.agent.observe.links import Links, Sampler
from controller.agent.observe.log_export import LogExport
from controller.agent.observe.logs import Logs
from controller.agent.observe.metrics import Metrics, Reading, ranks
from controller.agent.observe.metrics.host import Folders
from controller.agent.observe.oom import OomKills
from controller.agent.observe.pruning import Pruning
from controller.agent.observe.reporter import Reporter
from controller.agent.observe.stall_watch import StallWatch
from controller.agent.order_steps import Parts
from controller.agent.session import Session, SessionEvents
from controller.agent.state import AgentState
from controller.agent.worker_reports import WorkerReports
from controller.agent.workers.cgroups import WorkerCgroups
from controller.agent.workers.data_loaders import DataLoaders, LoaderEvents
from controller.agent.workers.orphans import Orphans
from controller.agent.workers.rendezvous import listen
from controller.agent.workers.script_store import ScriptStore
from controller.agent.workers.standby_events import StandbyEvents
from controller.agent.workers.standby_link import StandbyLink
from controller.agent.workers.supervisor import Supervisor
from controller.agent.workers.worker import Worker
from controller.agent.workers.worker_events import WorkerEvents
from outlast.clock import node_time_s
from outlast.interfaces import interface_of
from outlast.v1 import agents_pb2

logger = logging.getLogger(__name__)

# The controller answers within milliseconds; one that is stopped itself must not hold us up.
GOODBYE_S = 2.0


class Agent:
    """One node's agent, from start to SIGTERM. Make it inside a running event loop."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._controllers = Controllers(config)
        self._incarnation = secrets.token_hex(8)
        self._state = AgentState(config.state_dir, config.memory_dir, config.data_dir)
        self._predecessor = self._state.predecessor()
        # It was asked to end, and does so in order.
        self._is_leaving = False
        self._state.kill_leftovers()
        self._rendezvous = listen(config.address)
        self._machine = self._make_machine()
        self._reporter = Reporter(
            self._emit, lambda: self._session.is_connected, self._machine.reports
        )
        self._mistakes = Mistakes()
        self._standby = self._make_standby()
        self._suites = Suites(SuitePlace.of(config), self._standby)
        self._data_loaders = self._make_data_loaders()
        oom_kills = OomKills()
        self._cgroups = WorkerCgroups(config.state_dir, is_wanted=config.cgroups)
        self._supervisor = self._make_supervisor(oom_kills)
        running = self._supervisor.running
        self._orphans = Orphans(self._supervisor.with_process, self._own_pids)
        self._checkpoints = CheckpointReports(
            self._emit,
            newest_attempt=lambda job_id: self._commands.newest_attempt(job_id),
            running=running,
        )
        self._uploads = Uploads(self._checkpoints)
        self._replicas = Replicas(config, self._checkpoints)
        self._store = self._make_store()
        self._commands = self._make_commands()
        self._session = self._make_session()
        self._stall_watch = StallWatch(self._supervisor.workers, self._session.beat_now)
        self._workers = self._make_worker_reports()
        limits, most_bytes = config.limits, config.rank_log_bytes
        self._logs = Logs(config.jobs_dir, self._session.send, limits.max_log_queries, running)
        self._checks = CheckOrders(config, self._suites, self._session.send)
        folders = Folders.of(config)
        self._links = Links(self._emit, running, None if config.is_loopback else Sampler())
        self._log_export = LogExport(config, self._supervisor.workers)
        self._metrics = Metrics(self._reading, folders, self._links, self._log_export.queue)
        self._host = Host(folders, self._emit, running, oom_kills, max_log_bytes=most_bytes)
        self._pruning = Pruning.of(config)
        self._metrics_address = ""
        self._capacity = NodeCapacity.of(config)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then leave nothing behind."""
        stopped = asyncio.create_task(stop.wait(), name="stop")
        work: list[asyncio.Task[None]] = []
        try:
            self._begin(work)
            done, _ = await asyncio.wait([stopped, *work], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                # Neither loop ever ends by itself: this raises its mistake.
                task.result()
            await self._say_goodbye()
        finally:
            await self._shut_down([stopped, *work])

    def _begin(self, work: list[asyncio.Task[None]]) -> None:
        """Start what goes on until the end, and add its tasks to `work`."""
        config = self._config
        if config.metrics_port is not None:
            port = self._metrics.serve(config.address, config.metrics_port)
            self._metrics_address = f"{config.address}:{port}"
        self._standby.start()
        try:
            self._reporter.report_unsent(left_steps(config.jobs_dir, config.memory_dir))
        except OSError as error:
            self._mistakes.note("reporter", "steps of an earlier agent", error)
        self._commands.begin()
        work.append(asyncio.create_task(self._session.run(), name="session"))
        # Observers: a node can be kept without them for a while.
        for name, observer in (
            ("reporter", self._reporter.run),
            ("stall_watch", self._stall_watch.run),
            ("host", self._host.run),
            ("links", self._links.run),
            ("log export", self._log_export.run),
            ("orphans", self._orphans.run),
            ("pruning", self._pruning.run),
            ("certificate", self._controllers.keep_certificate),
        ):
            kept = keep_running(name, observer, self._mistakes)
            work.append(asyncio.create_task(kept, name=name))
        logger.info(
            "agent started: node=%s incarnation=%s pid=%d rendezvous_port=%d",
            config.node,
            self._incarnation,
            os.getpid(),
            self._rendezvous_port,
        )

    async def _say_goodbye(self) -> None:
        """Have the controller know that it was asked to end, before a worker feels it."""
        self._is_leaving = True
        goodbye = agents_pb2.Goodbye(incarnation=self._incarnation)
        self._emit(agents_pb2.AgentEvent(at_s=node_time_s(), goodbye=goodbye), Weight.LASTING)
        if not await self._session.all_heard(GOODBYE_S):
            logger.warning(
                "planned stop not acknowledged by the controller; "
                "the next agent on this node reports it"
            )

    def _note_left(self) -> None:
        if self._is_leaving and not self._supervisor.with_process():
            self._state.note_left()

    async def _shut_down(self, tasks: list[asyncio.Task[None] | asyncio.Task[bool]]) -> None:
        """End every part; one that fails keeps none of those after it from their end."""
        timeout_s = self._config.limits.shutdown_s
        for task in tasks:
            task.cancel()
        self._logs.cancel_all()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in (
            self._checks.close,
            self._commands.close,
            self._suites.close,
            self._supervisor.stop_all,
            self._store.close,
            self._data_loaders.close,
            lambda: self._standby.stop(timeout_s),
            self._cgroups.close,
            lambda: self._orphans.end(timeout_s),
            lambda: end_copies(self._uploads, self._replicas, timeout_s),
            self._metrics.close,
            self._host.close,
            self._links.close,
            self._log_export.close,
            self._rendezvous.close,
            self._note_left,
            self._state.close,
        ):
            try:
                ended = end()
                if ended is not None:
                    await ended
            except Exception:
                logger.exception("a part of the agent did not end in order")
        logger.info("agent stopped: node=%s", self._config.node)

    @property
    def _rendezvous_port(self) -> int:
        return int(self._rendezvous.getsockname()[1])

    def _make_machine(self) -> AgentMachine[agents_pb2.AgentEvent]:
        limits = self._config.limits
        return AgentMachine(
            self._state.load_ledger(),
            EventBuffer(limits.max_buffered_events),
            now_s=asyncio.get_running_loop().time(),
            limits=CommandLimits(kill_s=limits.kill_s, absence_stop_s=limits.absence_stop_s),
        )

    def _make_supervisor(self, oom_kills: OomKills) -> Supervisor:
        return Supervisor(
            limits=self._config.limits,
            standby=self._standby,
            events=WorkerEvents(
                requested=self._workers_requested,
                exited=lambda one: self._commands.worker_ended(one),
                kept_ended=lambda one: self._commands.kept_ended(one),
                forked=lambda one: self._commands.worker_forked(one),
                not_forked=lambda one: self._commands.worker_not_forked(one),
                changed=self._processes_changed,
            ),
            oom_kills=oom_kills,
            cgroups=self._cgroups,
            mistakes=self._mistakes,
        )

    def _make_worker_reports(self) -> WorkerReports:
        return WorkerReports(
            self._emit,
            self._supervisor,
            self._machine.is_end_coming,
            self._reporter,
            self._stall_watch,
            self._mistakes,
        )

    def _make_commands(self) -> Commands:
        return Commands(
            Parts(
                config=self._config,
                controllers=self._controllers,
                supervisor=self._supervisor,
                orphans=self._orphans,
                uploads=self._uploads,
                replicas=self._replicas,
                suites=self._suites,
                rendezvous_fd=self._rendezvous.fileno(),
                store=self._store,
                data_loaders=self._data_loaders,
                storage_awaited=self._checkpoints.storage_awaited,
                mistakes=self._mistakes,
            ),
            self._machine,
            emit=self._emit,
            report_end=lambda worker, is_last: self._workers.report_end(worker, is_last=is_last),
            send_events=lambda: self._session.wake(),
            save_ledger=self._state.save_ledger,
        )

    def _make_store(self) -> ScriptStore:
        log_path, handle = self._config.state_dir / "store.log", self._rendezvous.fileno()
        host = self._config.address
        return ScriptStore(self._standby, rendezvous_fd=handle, host=host, log_path=log_path)

    def _make_data_loaders(self) -> DataLoaders:
        events = LoaderEvents(
            started=lambda key: self._commands.data_loader_started(key),
            ended=lambda key, reason: self._commands.data_loader_ended(key, reason),
            changed=self._processes_changed,
        )
        return DataLoaders(self._standby, self._config.data_dir, events)

    def _make_standby(self) -> StandbyLink:
        loopback = self._config.is_loopback
        return StandbyLink(
            arguments=self._config.standby_arguments,
            rendezvous_fd=self._rendezvous.fileno(),
            interface="lo" if loopback else interface_of(self._config.address),
            log_path=self._config.state_dir / "standby.log",
            events=StandbyEvents(
                started=self._processes_changed,
                died=lambda: self._supervisor.standby_died(set(self._own_pids())),
                exited=lambda key, status: self._supervisor.worker_exited(key, status),
                running=self._running_pids,
            ),
            mistakes=self._mistakes,
        )

    def _make_session(self) -> Session:
        events = SessionEvents(
            hello=self._hello,
            heartbeat=self._heartbeat,
            received=self._received,
            welcomed=self._commands.welcomed,
            lost=self._session_lost,
            acknowledged=self._commands.acknowledged,
        )
        return Session(self._config, self._controllers, self._machine.line, events, Random())

    def _reading(self) -> Reading:
        return Reading(
            workers_running=len(self._supervisor.running()),
            events_buffered=len(self._machine.line.buffer),
            events_dropped=self._machine.line.buffer.num_dropped,
            heartbeats=self._session.num_heartbeats,
            sessions=self._session.num_sessions,
            is_connected=self._session.is_connected,
            standby_restarts=self._standby.num_restarts,
            mistakes=self._mistakes.counts,
            worker_exits=dict(self._workers.exits),
            uploads=dict(self._checkpoints.upload_ends),
            guarded=self._uploads.guarded,
            replicas=self._replicas.reading,
            ranks=ranks.read(self._supervisor.running()),
        )

    def _emit(self, event: agents_pb2.AgentEvent, weight: Weight) -> None:
        event.seq = self._machine.line.add(event, weight, (event.job_id, event.attempt))
        self._session.wake()

    def _hello(self) -> agents_pb2.Hello:
        return agents_pb2.Hello(
            node_id=self._config.node,
            incarnation=self._incarnation,
            address=self._config.address,
            rendezvous_port=self._rendezvous_port,
            workers=self._config.workers,
            version=outlast.__version__,
            worker_statuses=self._workers.statuses(),
            metrics_address=self._metrics_address,
            replica_port=self._replicas.port,
            replica_token=self._replicas.token,
            predecessor=self._predecessor,
            capacity=self._capacity.read(),
        )

    def _heartbeat(self) -> agents_pb2.Heartbeat:
        return agents_pb2.Heartbeat(ranks=self._workers.summaries(), links=self._links.messages())

    def _workers_requested(self, workers: list[Worker]) -> None:
        self._commands.workers_requested(workers)
        self._reporter.watch(workers)

    def _received(self, message: agents_pb2.ControllerMessage) -> None:
        kind = message.WhichOneof("kind")
        try:
            match kind:
                case "command":
                    self._commands.receive(message.command)
                case "log_query":
                    self._logs.query(message.log_query)
                case "check_order":
                    self._checks.take(message.check_order)
                case other:
                    logger.warning("message of an unknown kind from the controller: %s", other)
        except Exception as error:  # noqa: BLE001  # one message must not cost the node its workers
            self._mistakes.note(f"message {kind}", self._config.node, error)

    def _session_lost(self) -> None:
        """Questions that came over the connection need no answer any more."""
        self._commands.session_lost()
        self._logs.cancel_all()
        self._checks.cancel_all()

    def _own_pids(self) -> Iterator[int]:
        pids = (self._standby.pid, self._suites.pid, self._store.pid, *self._data_loaders.pids())
        return (pid for pid in pids if pid is not None)

    def _running_pids(self) -> Iterator[tuple[str, int]]:
        for worker in self._supervisor.with_process():
            if worker.pid is not None:
                yield worker.fork_key, worker.pid

    def _processes_changed(self) -> None:
        pids = [*self._own_pids(), *(pid for _, pid in self._running_pids())]
        try:
            self._state.write_agent(self._incarnation, self._rendezvous_port, pids)
        except OSError as error:
            # The disk may be full; a kernel that kills children with their parent remains.
            logger.error("processes of this agent are not on record: %s", error)
