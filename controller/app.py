"""The controller put together: `run` is one controller's life, from lock to last byte.

On SIGINT or SIGTERM it leaves in order: it stops listening to its own machine
first, so that the end of its local nodes is no fault, then ends them. When it is
killed instead, agents and training go on, and the next `run` finds them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from controller import join_token
from controller.clock import SteadyClock
from controller.core.context import Settings
from controller.core.edge.edge import Edge
from controller.core.events import NodeClosed, NodeEvent, NodeGone, NodesAwaited
from controller.core.machine import Machine
from controller.core.retention import Retention
from controller.diagnosis.runs import DiagnosticRuns
from controller.diagnosis.searches import FaultSearches
from controller.effects import Cluster, Effects, UnmanagedCluster
from controller.kube.config import KubeConfig
from controller.local.cluster import LocalCluster, LocalConfig
from controller.retention import Keeper
from controller.rpc.server import Parts, PortTakenError, Server
from controller.service import Service
from controller.sessions.incoming import Incoming
from controller.sessions.session import Sessions
from controller.specs import settings_of
from controller.store.curves import Curves
from controller.store.database import Database
from controller.store.diagnoses import Diagnoses
from controller.store.journal import Journal
from controller.store.lock import StateLock
from controller.store.reserve import Reserve
from controller.tally import Tally
from controller.web.app import Web
from controller.web.metrics import ControllerMetrics
from controller.web.metrics.sources import Sources
from outlast.clock import SystemClock
from outlast.errors import FatalError, OutlastError
from outlast.ids import NodeId
from outlast.startup import python_command, stop_signals

logger = logging.getLogger(__name__)

DEFAULT_GRPC = "127.0.0.1:7070"
DEFAULT_HTTP = "127.0.0.1:7071"
EXIT_OK, EXIT_BROKEN, EXIT_REFUSED = 0, 1, 2


class StateDirError(FatalError):
    """The state directory cannot be used."""


class MissingClientError(FatalError):
    """Kubernetes is wanted, and its client is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One controller."""

    state_dir: Path
    grpc: str = DEFAULT_GRPC
    """host:port; port 0 takes a free one."""
    http: str = DEFAULT_HTTP
    local_nodes: int = 0
    """Nodes to run on this machine."""
    workers_per_node: int = 1
    standby: int = 0
    """Local nodes on top of `local_nodes`."""
    kube: KubeConfig | None = None
    """The Kubernetes cluster that nodes come from; it has none of local nodes then."""
    fresh: bool = False
    """Forget the jobs, end what runs, and empty the host memory of local nodes first."""
    join_token_file: Path | None = None
    """What agents must show; made when it is missing. With local nodes there is always one."""
    settings: Settings = field(default_factory=Settings)
    """Bounds of the fleet as a whole."""
    retention: Retention = field(default_factory=Retention)
    """What is kept of ended jobs."""
    agent_command: tuple[str, ...] = python_command("controller.agent")

    def __post_init__(self) -> None:
        for name in ("local_nodes", "standby"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 0 or more")
        if self.kube is not None and self.local_nodes + self.standby:
            raise ValueError("nodes come from a Kubernetes cluster or run here, not both")
        if self.workers_per_node < 1:
            raise ValueError(f"workers_per_node is {self.workers_per_node}; allowed: 1 or more")
        for name in ("grpc", "http"):
            parse_address(getattr(self, name), f"--{name}")

    @property
    def token_file(self) -> Path | None:
        """The file of join tokens; None when agents need none."""
        if self.join_token_file is None and self.local_nodes + self.standby:
            return self.state_dir.resolve() / join_token.FILE_NAME
        return None if self.join_token_file is None else self.join_token_file.resolve()


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A controller that listens."""

    grpc: str
    http: str
    term: int
    adopted: int = 0
    """Local nodes that an earlier controller left running."""
    dead: tuple[NodeId, ...] = ()
    """Local nodes whose agents have ended, and which stay away."""


OnReady = Callable[[Running], None]


class NodeSource(Cluster, Protocol):
    """A cluster whose nodes begin and end with us, or are found again."""

    async def start(self) -> None: ...

    async def failed(self) -> None:
        """Raise what ended its work, once that has happened."""

    async def stop_all(self) -> None:
        """The controller stops in order."""

    async def leave(self) -> None:
        """The controller stops; everything stays as it is."""

    async def forget_everything(self) -> None:
        """End whatever still runs, and drop all that nodes keep."""


def main(options: Options, on_ready: OnReady | None = None) -> int:
    """Run a controller until a signal ends it; its exit code. Errors are one clear line."""
    try:
        asyncio.run(run(options, on_ready))
    except OutlastError as error:
        print(f"outlast: {error}", file=sys.stderr)
        is_refusal = isinstance(error, FatalError) and not isinstance(error, LoopEndedError)
        return EXIT_REFUSED if is_refusal else EXIT_BROKEN
    return EXIT_OK


class LoopEndedError(FatalError):
    """The controller's loop failed; the process must end."""


async def run(
    options: Options, on_ready: OnReady | None = None, *, stop: asyncio.Event | None = None
) -> None:
    """One controller's life; returns after SIGINT, SIGTERM or `stop`.

    Raises:
        FatalError: it could not start (state directory, second controller, port),
            or its loop failed: then local nodes are left running, as after a crash.
    """
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        lock = _open_state_dir(options.state_dir)
        stack.callback(lock.close)
        if options.fresh:
            _forget_jobs(options.state_dir)
        if options.token_file is not None:
            join_token.make_if_missing(options.token_file)
            join_token.read(options.token_file)
        http = _bind_http(options.http)
        stack.callback(http.close)
        controller = await stack.enter_async_context(_assemble(options))
        grpc = controller.bind(options.grpc)
        _warn_if_open(grpc, "--grpc", has_token=options.token_file is not None)
        running = Running(grpc=grpc, http=_name(http), term=controller.journal.term)
        lock.say(grpc=running.grpc, http=running.http)
        await controller.live(options, running, http, stop, on_ready)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Controller:
    """The parts of a controller that is not running yet."""

    service: Service
    journal: Journal
    edge: Edge
    server: Server
    web: Web
    effects: Effects
    sessions: Sessions
    metrics: ControllerMetrics
    runs: DiagnosticRuns

    def bind(self, address: str) -> str:
        host, port = parse_address(address, "--grpc")
        # gRPC's own message names no reason.
        _check_free(host, port, "--grpc")
        try:
            return f"{host}:{self.server.bind(host, port)}"
        except PortTakenError as error:
            raise PortTakenError(f"{error} (--grpc)") from error

    async def live(
        self,
        options: Options,
        running: Running,
        http: socket.socket,
        stop: asyncio.Event,
        on_ready: OnReady | None,
    ) -> None:
        cluster = self._make_cluster(options, running.grpc)
        if cluster is not None:
            self.effects.use(cluster)
        file = options.state_dir / "controller.json"
        loop = asyncio.create_task(self.service.run(), name="service")
        web = asyncio.create_task(self.web.serve(http), name="web")
        keeper = asyncio.create_task(
            Keeper(self.service, options.retention).run(), name="retention"
        )
        stopped = asyncio.create_task(stop.wait(), name="stop")
        parts = [loop, web]
        if cluster is not None:
            parts.append(asyncio.create_task(cluster.failed(), name="cluster"))
        try:
            if cluster is not None and options.fresh:
                await cluster.forget_everything()
            await self.server.start()
            _write_whole(file, {"pid": os.getpid(), "grpc": running.grpc, "http": running.http})
            if cluster is not None:
                await cluster.start()
            if isinstance(cluster, LocalCluster):
                running = replace(running, adopted=cluster.adopted, dead=cluster.dead)
            logger.info(
                "controller listens: grpc=%s http=%s term=%d",
                running.grpc,
                running.http,
                running.term,
            )
            if on_ready is not None:
                on_ready(running)
            await asyncio.wait([*parts, stopped], return_when=asyncio.FIRST_COMPLETED)
            _raise_failure(parts)
            logger.info("controller stops")
            self.service.is_leaving = True
            if cluster is not None:
                # Agents say goodbye, and that is journalled: no fault of theirs at the next start.
                await cluster.stop_all()
            self.service.stop()
            file.unlink(missing_ok=True)
        finally:
            self.service.stop()
            self.web.stop()
            await self.runs.close()
            await self.server.stop()
            if cluster is not None:
                await cluster.leave()
            for task in (stopped, keeper, *parts[2:]):
                task.cancel()
            await asyncio.gather(*parts, stopped, keeper, return_exceptions=True)

    def _make_cluster(self, options: Options, grpc: str) -> NodeSource | None:
        if options.kube is not None:
            return self._make_kube(options.kube)
        if options.local_nodes + options.standby == 0:
            return None

        def gone(node: NodeId, detail: str, at_s: float) -> None:
            self.service.post(NodeGone(node=node, detail=detail, at_s=at_s))

        config = LocalConfig(
            state_dir=options.state_dir,
            nodes=options.local_nodes + options.standby,
            workers_per_node=options.workers_per_node,
            controller_address=grpc,
            join_token_file=options.token_file,
            agent_command=options.agent_command,
        )
        return LocalCluster(config, gone)

    def _make_kube(self, config: KubeConfig) -> NodeSource:
        # The client takes most of a second to import, and only those on Kubernetes have it.
        try:
            from controller.kube.cluster import KubeCluster
            from controller.kube.metrics import collect
        except ModuleNotFoundError as error:
            raise MissingClientError(
                f"no Kubernetes client ({error}); install it with `pip install outlast[kubernetes]`"
            ) from error

        cluster = KubeCluster(
            config,
            state=lambda: self.service.state,
            incarnations=self.sessions.incarnations,
            post=self._cluster_said,
            changes=self.service.changes,
            clock=SystemClock(),
        )
        self.metrics.add(partial(collect, cluster))
        return cluster

    def _cluster_said(self, event: NodeEvent | NodesAwaited) -> None:
        self.service.post(event)
        if isinstance(event, NodeClosed):
            self.service.post(*self.edge.closed(event, self.service.now_s))


@asynccontextmanager
async def _assemble(options: Options) -> AsyncIterator[_Controller]:
    """Open the journal, take the term, and build everything around the machine."""
    clock = SteadyClock()
    metrics = ControllerMetrics()
    reserve = Reserve(options.state_dir)
    reserve.make_room()
    database = Database(options.state_dir / "journal.sqlite")
    try:
        journal = Journal(database, clock, on_commit=metrics.committed)
        journal.take_over()
        settings = replace(options.settings, brings_nodes=options.kube is not None)
        machine = Machine(journal.load(), settings)
        edge = Edge(machine.state, settings_of)
        sessions = Sessions()
        incoming = Incoming(machine.state)
        tally = Tally()
        runs = DiagnosticRuns(sessions, Diagnoses(database), clock, tally)
        searches = FaultSearches(runs)
        effects = Effects(sessions.send, UnmanagedCluster(), searches)
        service = Service(
            machine=machine,
            journal=journal,
            curves=Curves(database),
            edge=edge,
            effects=effects,
            clock=clock,
            reserve=reserve,
        )
        if not reserve.acquire():
            service.begin_read_only(f"{options.state_dir}: no room for the reserve")
        searches.report_to(service)
        metrics.read_from(
            Sources(
                service=service,
                edge=edge,
                sessions=sessions,
                effects=effects,
                tally=tally,
                incoming=incoming,
                clock=clock,
            )
        )
        checkpoints = (options.state_dir / "checkpoints").resolve()
        parts = Parts(
            service=service,
            sessions=sessions,
            edge=edge,
            runs=runs,
            clock=clock,
            checkpoint_root=checkpoints.as_uri(),
            tally=tally,
            incoming=incoming,
            join_token_file=options.token_file,
        )
        yield _Controller(
            service=service,
            journal=journal,
            edge=edge,
            server=Server(parts),
            web=Web(service, journal, sessions, metrics),
            effects=effects,
            sessions=sessions,
            metrics=metrics,
            runs=runs,
        )
    finally:
        database.close()


def _raise_failure(parts: Sequence[asyncio.Task[None]]) -> None:
    for task in parts:
        if task.done() and not task.cancelled() and task.exception() is not None:
            error = task.exception()
            if not isinstance(error, OutlastError):
                logger.error("the controller's %s failed", task.get_name(), exc_info=error)
            raise LoopEndedError(
                f"stopped, because its {task.get_name()} failed: {error}; agents and training "
                "go on; start it again with the same --state-dir"
            ) from error
        if task.done():
            raise LoopEndedError(f"stopped, because its {task.get_name()} ended")


def _warn_if_open(address: str, option: str, *, has_token: bool) -> None:
    """Say what it means when others than this machine can connect: clients are not asked."""
    host, _ = parse_address(address, option)
    try:
        if ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        if host == "localhost":
            return
    logger.warning(
        "%s is %s: everyone who can reach this port can submit jobs, and so run programs on every "
        "node, as the user of the agents; there is no authentication of clients yet. Let only "
        "agents and clients reach it (a firewall, or deploy/kubernetes/network.yaml), or listen "
        "on 127.0.0.1",
        option,
        address,
    )
    if not has_token:
        logger.warning(
            "everyone who can reach %s can join as a node, too, and is given jobs with what is in "
            "their specs; give a --join-token-file that agents must show",
            address,
        )


def parse_address(address: str, option: str) -> tuple[str, int]:
    """Host and port of `host:port`; ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{option} is {address!r}; it must be host:port, such as {DEFAULT_GRPC}")
    return host.strip("[]"), int(port)


def _open_state_dir(state_dir: Path) -> StateLock:
    """The lock of a directory that can be written."""
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        Reserve(state_dir).make_room()
        probe = state_dir / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
        return StateLock(state_dir)
    except OSError as error:
        raise StateDirError(
            f"the state directory {state_dir} cannot be written: {error.strerror or error}; "
            "give another with --state-dir"
        ) from error


def _forget_jobs(state_dir: Path) -> None:
    """Drop the journal. Checkpoints and prepared data stay: they are the user's."""
    for path in state_dir.glob("journal.sqlite*"):
        path.unlink()


def _bind_http(address: str) -> socket.socket:
    host, port = parse_address(address, "--http")
    return _listen(host, port, "--http")


def _check_free(host: str, port: int, option: str) -> None:
    _listen(host, port, option).close()


def _listen(host: str, port: int, option: str) -> socket.socket:
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(target[:2], family=family)
    except OSError as error:
        raise PortTakenError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            f"choose another address with {option}"
        ) from error


def _name(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"{host}:{port}"


def _write_whole(path: Path, document: object) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(document))
    draft.replace(path)
