"""The parts of a controller, put together around the machine."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from controller.access.audit import Audit
from controller.access.callers import Callers
from controller.access.node_authority import NodeAuthority
from controller.access.tls import ServerTls
from controller.addresses import PortTakenError, check_free, parse_address
from controller.clock import SteadyClock
from controller.core.edge.edge import Edge
from controller.core.machine import Machine
from controller.core.node_events import ClusterNews, NodeClosed, NodeEvent, NodeGone
from controller.counters import Counters
from controller.diagnosis.runs import DiagnosticRuns
from controller.diagnosis.searches import FaultSearches
from controller.effects import Cluster, Effects, UnmanagedCluster
from controller.kube.config import KubeConfig
from controller.local.cluster import LocalCluster, LocalConfig
from controller.options import Options
from controller.own_calls import OwnCalls
from controller.rpc.server import Parts, Server
from controller.service import Service
from controller.sessions.incoming import Incoming
from controller.sessions.session import Sessions
from controller.specs import settings_of
from controller.state_dir import JOURNAL
from controller.store.code import CodeStore
from controller.store.curves import Curves
from controller.store.database import Database
from controller.store.diagnoses import Diagnoses
from controller.store.history import History
from controller.store.journal import Journal
from controller.store.lease import Lease
from controller.store.node_certificates import NodeCertificates
from controller.store.reserve import Reserve
from controller.store.trends import TrendStore
from controller.trends.watch import TrendWatch
from controller.web.app import Web
from controller.web.metrics import ControllerMetrics
from controller.web.metrics.sources import Sources
from outlast.access import CA_FILE, AccessError, read_text
from outlast.clock import SystemClock
from outlast.errors import FatalError
from outlast.ids import NodeId


class MissingClientError(FatalError):
    """Kubernetes is wanted, and its client is not installed."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """The parts of a controller that is not running yet."""

    parts: Parts
    journal: Journal
    lease: Lease
    server: Server
    web: Web
    effects: Effects
    metrics: ControllerMetrics

    def bind(self, address: str) -> str:
        """Take the port for agents and clients; what is listened on.

        Raises:
            PortTakenError: it cannot be had.
        """
        host, port = parse_address(address, "--grpc")
        # gRPC's own message names no reason.
        check_free(host, port, "--grpc")
        try:
            return f"{host}:{self.server.bind(host, port)}"
        except PortTakenError as error:
            raise PortTakenError(f"{error} (--grpc)") from error

    def bind_nodes(self, address: str) -> str:
        """Take the port for nodes that have a certificate; what is listened on.

        Raises:
            PortTakenError: it cannot be had.
        """
        host, port = parse_address(address, "--node-grpc")
        check_free(host, port, "--node-grpc")
        try:
            return f"{host}:{self.server.bind_nodes(host, port)}"
        except PortTakenError as error:
            raise PortTakenError(f"{error} (--node-grpc)") from error

    def make_cluster(self, options: Options, grpc: str, own: str) -> NodeSource | None:
        """Where nodes come from, if not from people who start agents.

        `grpc` is where agents reach us, `own` where we reach ourselves.

        Raises:
            MissingClientError: Kubernetes is wanted, and its client is not installed.
        """
        if options.kube is not None:
            kube = replace(options.kube, agent_options=options.agent_options)
            return self._make_kube(kube, own)
        if options.local_nodes + options.standby == 0:
            return None

        def gone(node: NodeId, detail: str, at_s: float) -> None:
            self.parts.service.post(NodeGone(node=node, detail=detail, at_s=at_s))

        config = LocalConfig(
            state_dir=options.state_dir,
            nodes=options.local_nodes + options.standby,
            workers_per_node=options.workers_per_node,
            controller_address=grpc,
            join_token_file=options.token_file,
            tls_dir=options.tls_dir,
            agent_command=(*options.agent_command, *options.agent_options),
            can_come_back=not options.stop_with_stdin,
        )
        return LocalCluster(config, gone)

    def _make_kube(self, config: KubeConfig, own: str) -> NodeSource:
        # The client takes most of a second to import, and only those on Kubernetes have it.
        try:
            from controller.kube.cluster import KubeCluster
            from controller.kube.metrics import collect
            from controller.kube.training_job import OWNER
        except ModuleNotFoundError as error:
            raise MissingClientError(
                f"no Kubernetes client ({error}); install it with `pip install outlast[kubernetes]`"
            ) from error

        service = self.parts.service
        cluster = KubeCluster(
            config,
            state=lambda: service.state,
            incarnations=self.parts.sessions.incarnations,
            post=self._cluster_said,
            changes=service.changes,
            clock=SystemClock(),
            calls=self._own_calls(own, OWNER) if config.training_jobs else None,
        )
        self.metrics.add(partial(collect, cluster))
        return cluster

    def _own_calls(self, own: str, name: str) -> OwnCalls:
        return OwnCalls(own, name, self.parts.own_secret)

    def _cluster_said(self, event: NodeEvent | ClusterNews) -> None:
        service = self.parts.service
        service.post(event)
        if isinstance(event, NodeClosed):
            service.post(*self.parts.edge.closed(event, service.now_s))


def open_database(options: Options) -> Database:
    """The database of the journal. It must be closed."""
    Reserve(options.state_dir).make_room()
    return Database(options.journal or options.state_dir / JOURNAL)


def assemble(options: Options, lease: Lease) -> Controller:
    """Take the term in the database that is claimed, and build everything around the machine."""
    clock, counters, database = SteadyClock(), Counters(), lease.database
    metrics = ControllerMetrics()
    journal = Journal(database, clock, on_commit=metrics.committed)
    journal.take_over()
    settings = replace(options.settings, brings_nodes=options.kube is not None)
    machine = Machine(journal.load(), settings)
    sessions = _sessions(machine)
    runs = DiagnosticRuns(sessions, Diagnoses(database), clock, counters)
    searches = FaultSearches(runs)
    effects = Effects(sessions.send, UnmanagedCluster(), searches)
    edge = Edge(machine.state, settings_of)
    service = _service(options, database, journal, machine, edge, effects, clock)
    searches.report_to(service)
    parts = Parts(
        service=service,
        sessions=sessions,
        edge=edge,
        runs=runs,
        clock=clock,
        checkpoint_root=(options.state_dir / "checkpoints").resolve().as_uri(),
        counters=counters,
        incoming=Incoming(machine.state),
        code=CodeStore(options.state_dir / "code", options.max_code_bytes),
        callers=Callers(
            options.tokens_file,
            certificates=options.client_certificates,
            node_certificates=options.node_ca is not None,
        ),
        audit=Audit(options.state_dir),
        trends=TrendWatch(service, edge, TrendStore(database)),
        tls=None if options.tls_dir is None else ServerTls(options.tls_dir),
        join_token_file=options.token_file,
        node_certificates=NodeCertificates(database, time.time()),
        node_authority=_node_authority(options),
    )
    metrics.read_from(_sources(parts, effects, clock))
    return Controller(
        parts=parts,
        journal=journal,
        lease=lease,
        server=Server(parts),
        web=_web(parts, journal, metrics, options),
        effects=effects,
        metrics=metrics,
    )


def _node_authority(options: Options) -> NodeAuthority | None:
    """Who signs for nodes.

    Raises:
        AccessError: --node-ca has no authority that can be used for nodes alone.
    """
    if options.node_ca is None:
        return None
    lasts = datetime.timedelta(hours=options.node_certificate_hours)
    authority = NodeAuthority(options.node_ca, lasts)
    if options.tls_dir is not None and authority.is_of(read_text(options.tls_dir / CA_FILE)):
        raise AccessError(
            f"--node-ca {options.node_ca} is the authority of --tls-dir: whoever has its key can "
            "pose as the controller; `outlast certs init DIR` makes one for nodes alone"
        )
    return authority


def _service(
    options: Options,
    database: Database,
    journal: Journal,
    machine: Machine,
    edge: Edge,
    effects: Effects,
    clock: SteadyClock,
) -> Service:
    """The service; read-only where there is no room for the reserve."""
    reserve = Reserve(options.state_dir)
    service = Service(
        machine=machine,
        journal=journal,
        curves=Curves(database),
        history=History(database),
        edge=edge,
        effects=effects,
        clock=clock,
        reserve=reserve,
    )
    if not reserve.acquire():
        service.begin_read_only(f"{options.state_dir}: no room for the reserve")
    return service


def _sessions(machine: Machine) -> Sessions:
    known = machine.state.nodes.values()
    return Sessions({node.node: (*node.superseded, node.incarnation) for node in known})


def _web(parts: Parts, journal: Journal, metrics: ControllerMetrics, options: Options) -> Web:
    return Web(
        parts.service,
        journal,
        parts.sessions,
        metrics,
        parts.callers,
        parts.audit,
        tls=parts.tls,
        plan_job=options.plan_job,
        is_open=options.is_http_open,
    )


def _sources(parts: Parts, effects: Effects, clock: SteadyClock) -> Sources:
    return Sources(
        service=parts.service,
        edge=parts.edge,
        sessions=parts.sessions,
        effects=effects,
        counters=parts.counters,
        incoming=parts.incoming,
        clock=clock,
        trends=parts.trends,
    )
