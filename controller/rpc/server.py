"""The gRPC server: every service, health and reflection, with bounds on all that comes in."""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from controller.access.audit import Audit
from controller.access.callers import Callers
from controller.access.gate import Gate
from controller.access.node_authority import NodeAuthority
from controller.access.tls import ServerTls
from controller.addresses import PortTakenError
from controller.core.edge.edge import Edge
from controller.counters import Counters
from controller.diagnosis.runs import DiagnosticRuns
from controller.rpc.access import AccessService
from controller.rpc.code import CodeService
from controller.rpc.diagnostics import DiagnosticsService
from controller.rpc.enrollment import EnrollmentService
from controller.rpc.incidents import IncidentsService
from controller.rpc.jobs import JobsService
from controller.rpc.nodes import NodesService
from controller.rpc.ranks import RanksService
from controller.rpc.trends import TrendsService
from controller.service import Service
from controller.sessions.admission import Admission
from controller.sessions.agents import AgentsService
from controller.sessions.incoming import Incoming
from controller.sessions.logs import LogQueries
from controller.sessions.session import Sessions
from controller.store.code import CodeStore
from controller.store.node_certificates import NodeCertificates
from controller.trends.watch import TrendWatch
from outlast.clock import Clock
from outlast.v1 import (
    access_pb2,
    agents_pb2,
    code_pb2,
    diagnostics_pb2,
    enrollment_pb2,
    incidents_pb2,
    jobs_pb2,
    nodes_pb2,
    ranks_pb2,
    trends_pb2,
)
from outlast.v1.access_pb2_grpc import add_AccessServicer_to_server
from outlast.v1.code_pb2_grpc import add_CodeServicer_to_server
from outlast.v1.diagnostics_pb2_grpc import add_DiagnosticsServicer_to_server
from outlast.v1.enrollment_pb2_grpc import add_EnrollmentServicer_to_server
from outlast.v1.incidents_pb2_grpc import add_IncidentsServicer_to_server
from outlast.v1.jobs_pb2_grpc import add_JobsServicer_to_server
from outlast.v1.nodes_pb2_grpc import add_NodesServicer_to_server
from outlast.v1.ranks_pb2_grpc import add_RanksServicer_to_server
from outlast.v1.trends_pb2_grpc import add_TrendsServicer_to_server

# The inventory of a node with many dead workers carries a traceback of each. What is taken from
# agents before they are known is less: see `admission`.
MAX_INBOUND_BYTES = 16 * 2**20
# A curve of a million steps.
MAX_OUTBOUND_BYTES = 128 * 2**20
# Of a Unix socket: 108 bytes with the one that ends it.
_MAX_SOCKET_PATH = 107
# Every agent holds one call for life; people and programs share the rest.
MAX_CALLS = 20_000

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_INBOUND_BYTES),
    ("grpc.max_send_message_length", MAX_OUTBOUND_BYTES),
    # Two controllers on one port would each get half of the agents.
    ("grpc.so_reuseport", 0),
    # A peer that connects and does not speak HTTP/2 is let go.
    ("grpc.server_handshake_timeout_ms", 5_000),
    # A peer that is gone without a word is noticed, and its call freed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the services work with."""

    service: Service
    sessions: Sessions
    edge: Edge
    runs: DiagnosticRuns
    clock: Clock
    checkpoint_root: str
    counters: Counters
    incoming: Incoming
    code: CodeStore
    callers: Callers
    audit: Audit
    trends: TrendWatch
    # What this process shows where it calls itself.
    own_secret: str = field(default_factory=secrets.token_hex)
    # None: in clear text.
    tls: ServerTls | None = None
    # What agents must show to be let in; None when nobody is asked.
    join_token_file: Path | None = None
    # Who has got a certificate, and who signs them; None: nobody does.
    node_certificates: NodeCertificates
    node_authority: NodeAuthority | None = None


class Server:
    """The controller's gRPC end."""

    def __init__(self, parts: Parts) -> None:
        self._sessions = parts.sessions
        self._tls, self._callers = parts.tls, parts.callers
        self._own_socket: Path | None = None
        self._own_folder: Path | None = None
        gate = Gate(parts.callers, parts.audit, parts.service.owner_of, parts.own_secret)
        self._server = grpc.aio.server(
            options=_OPTIONS, interceptors=[gate], maximum_concurrent_rpcs=MAX_CALLS
        )
        service, sessions = parts.service, parts.sessions
        logs = LogQueries(service, sessions, parts.edge)
        runs = parts.runs
        agents = AgentsService(
            service=service,
            sessions=sessions,
            edge=parts.edge,
            logs=logs,
            runs=runs,
            counters=parts.counters,
            incoming=parts.incoming,
        )
        places = parts.checkpoint_root, parts.code
        measured = parts.counters.matmul_flops
        jobs = JobsService(service, sessions, parts.edge, logs, *places, measured)
        certificates, authority = parts.node_certificates, parts.node_authority
        nodes = NodesService(service, sessions, parts.edge, parts.clock, certificates)
        add_AccessServicer_to_server(AccessService(parts.callers, parts.audit), self._server)
        enrolled = None if authority is None else certificates
        admission = Admission(agents, parts.join_token_file, parts.audit, enrolled)
        self._server.add_generic_rpc_handlers((admission.handler(),))
        code = CodeService(parts.code, partial(admission.check_token, call="Code/GetCode"))
        add_CodeServicer_to_server(code, self._server)
        check_token = partial(admission.check_token, call="Enrollment/Enroll")
        self._enrollment = EnrollmentService(authority, certificates, parts.audit, check_token)
        self._node_authority = authority
        add_EnrollmentServicer_to_server(self._enrollment, self._server)
        add_JobsServicer_to_server(jobs, self._server)
        add_NodesServicer_to_server(nodes, self._server)
        add_IncidentsServicer_to_server(IncidentsService(service), self._server)
        add_RanksServicer_to_server(RanksService(service, parts.edge, logs), self._server)
        diagnostics = DiagnosticsService(service, sessions, runs)
        add_DiagnosticsServicer_to_server(diagnostics, self._server)
        trends = TrendsService(service, parts.trends, runs, measured)
        add_TrendsServicer_to_server(trends, self._server)
        # The stubs do not know its asyncio half.
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [*_service_names(), health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )

    def bind(self, host: str, port: int) -> int:
        """Take a port, a free one for 0; returns it.

        Raises:
            PortTakenError: someone else has it, or the host is not ours.
        """
        credentials = None
        if self._tls is not None:
            asks = self._callers.certificates
            credentials = self._tls.grpc_credentials(client_certificates=asks)
        return self._bind(host, port, credentials)

    def bind_nodes(self, host: str, port: int) -> int:
        """Take a port for nodes that have a certificate; returns it.

        Raises:
            PortTakenError: as `bind`.
        """
        assert self._tls is not None
        assert self._node_authority is not None
        credentials = self._tls.grpc_credentials(
            client_certificates=True, node_authority=self._node_authority.ca
        )
        self._enrollment.port = self._bind(host, port, credentials)
        return self._enrollment.port

    def bind_own(self, state_dir: Path) -> str:
        """A socket that this process's user alone reaches; returns its address.

        It is in the state directory, which one controller has at a time, so that one of a
        controller that was killed is replaced; where that has a longer path than the kernel
        takes, in a folder of its own.

        Raises:
            PortTakenError: it cannot be made.
        """
        path = state_dir.resolve() / "grpc.socket"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            self._own_folder = Path(tempfile.mkdtemp(prefix="outlast-", dir="/tmp"))
            path = self._own_folder / "grpc.socket"
        address = f"unix:{path}"
        try:
            path.unlink(missing_ok=True)
            self._server.add_insecure_port(address)
            path.chmod(0o600)
        except (RuntimeError, OSError) as error:
            raise PortTakenError(f"cannot listen at {path}: {error}") from error
        self._own_socket = path
        return address

    def _bind(self, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                bound: int = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise PortTakenError(f"cannot listen on {address}: {error}") from error
        if bound == 0:
            raise PortTakenError(f"cannot listen on {address}")
        return bound

    async def start(self) -> None:
        """Answer calls from now on."""
        await self._server.start()
        for name in ("", *_service_names()):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """End every call and let go of the port."""
        await self._health.enter_graceful_shutdown()
        self._sessions.close_all()
        await self._server.stop(grace=0.2)
        if (path := self._own_socket) is not None:
            path.unlink(missing_ok=True)
            if self._own_folder is not None:
                self._own_folder.rmdir()


def _service_names() -> list[str]:
    files = (
        access_pb2,
        agents_pb2,
        code_pb2,
        diagnostics_pb2,
        enrollment_pb2,
        incidents_pb2,
        jobs_pb2,
        nodes_pb2,
        ranks_pb2,
        trends_pb2,
    )
    return [
        service.full_name for file in files for service in file.DESCRIPTOR.services_by_name.values()
    ]
