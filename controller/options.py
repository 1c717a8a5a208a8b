"""What one controller is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from controller import join_token
from controller.addresses import DEFAULT_GRPC, DEFAULT_HTTP, parse_address
from controller.core.retention import Retention
from controller.core.settings import Settings
from controller.kube.config import KubeConfig
from controller.notify.settings import NOBODY, Notify
from controller.planner import PlanJob
from outlast.channel import is_loopback
from outlast.code.digest import DEFAULT_MAX_BYTES
from outlast.log_format import LogFormat
from outlast.startup import python_command

if TYPE_CHECKING:
    import sqlalchemy

# Where nodes with a certificate connect, beside `DEFAULT_GRPC` and `DEFAULT_HTTP`.
DEFAULT_NODE_PORT = 7072
# They are renewed by themselves; what lasts longer is for `outlast certs issue`.
NODE_CERTIFICATE_HOURS = 24.0
MAX_NODE_CERTIFICATE_HOURS = 30 * 24.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One controller."""

    state_dir: Path
    grpc: str = DEFAULT_GRPC
    """host:port; port 0 takes a free one."""
    http: str = DEFAULT_HTTP
    open_http: bool = False
    """Whether the page and its API answer others than this machine."""
    local_nodes: int = 0
    """Nodes to run on this machine."""
    workers_per_node: int = 1
    standby: int = 0
    """Local nodes on top of `local_nodes`."""
    journal: sqlalchemy.URL | None = None
    """The PostgreSQL database of the journal; None: a file in `state_dir`."""
    kube: KubeConfig | None = None
    """The Kubernetes cluster that nodes come from; it has none of local nodes then."""
    wait: bool = False
    """Whether to wait while another controller uses `state_dir` or `journal`."""
    fresh: bool = False
    """Forget the jobs, end what runs, and empty the host memory of local nodes first."""
    stop_with_stdin: bool = False
    """Stop when standard input ends, as it does with the program that started this one, and leave
    nothing in the host memory of local nodes."""
    join_token_file: Path | None = None
    """What agents must show; made when it is missing. With local nodes there is always one."""
    tls_dir: Path | None = None
    """The certificate to show: tls.crt, tls.key, and ca.crt of the authority. None: clear text."""
    client_certificates: bool = False
    """Whether who connects to gRPC must show a certificate of the authority."""
    node_ca: Path | None = None
    """An authority (ca.crt, ca.key) that signs certificates for nodes; None: nobody does that."""
    node_grpc: str = ""
    """host:port for nodes that have one; "" for `DEFAULT_NODE_PORT` at the host of `grpc`."""
    node_certificate_hours: float = NODE_CERTIFICATE_HOURS
    """How long they hold."""
    tokens_file: Path | None = None
    """Who may call, in which role; None when no token is asked for."""
    insecure: bool = False
    """Listen beyond this machine though anyone who reaches the port may do everything."""
    settings: Settings = field(default_factory=Settings)
    """Bounds of the fleet as a whole."""
    retention: Retention = field(default_factory=Retention)
    """What is kept of ended jobs."""
    notify: Notify = NOBODY
    """Who is told of incidents and ends of jobs."""
    max_code_bytes: int = DEFAULT_MAX_BYTES
    """How large the archive of a job's code may be."""
    plan_job: PlanJob | None = None
    """For the page; the arithmetic is the trainer's, which a controller does not know by itself."""
    agent_command: tuple[str, ...] = python_command("controller.agent")
    log_format: LogFormat = LogFormat.PRETTY
    """Of this process, and of agents that it starts."""
    otlp_endpoint: str = ""
    """Where they export logs to by OTLP; "" for what OpenTelemetry's variables say."""

    def __post_init__(self) -> None:
        for name in ("local_nodes", "standby"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 0 or more")
        if self.kube is not None and self.local_nodes + self.standby:
            raise ValueError("nodes come from a Kubernetes cluster or run here, not both")
        if self.wait and self.fresh:
            raise ValueError("--fresh forgets the jobs that --wait is there to take over; give one")
        if self.journal is not None and self.fresh:
            raise ValueError(
                "--fresh forgets the journal in --state-dir; for another one give --journal an "
                "empty database"
            )
        if self.workers_per_node < 1:
            raise ValueError(f"workers_per_node is {self.workers_per_node}; allowed: 1 or more")
        for name in ("grpc", "http"):
            parse_address(getattr(self, name), f"--{name}")
        if self.node_ca is not None:
            self._check_node_ca(self.node_ca)
        elif self.node_grpc:
            raise ValueError("--node-grpc goes with --node-ca")
        elif self.node_certificate_hours != NODE_CERTIFICATE_HOURS:
            raise ValueError("--node-cert-hours goes with --node-ca")
        self._check_access()

    def _check_node_ca(self, folder: Path) -> None:
        if self.tls_dir is None:
            raise ValueError(f"--node-ca {folder} goes with --tls-dir")
        if self.client_certificates:
            raise ValueError(
                "--node-ca gives certificates to nodes that connect to --grpc without one, which "
                "--client-certificates lets nobody do; give --tokens-file"
            )
        if self.kube is not None:
            raise ValueError(
                "--node-ca is for agents that keep their key between starts, which those of "
                "--kube-namespace do not"
            )
        if not 0 < self.node_certificate_hours <= MAX_NODE_CERTIFICATE_HOURS:
            raise ValueError(
                f"--node-cert-hours is {self.node_certificate_hours:g}; allowed: more than 0, "
                f"up to {MAX_NODE_CERTIFICATE_HOURS:g}"
            )
        parse_address(self.node_address, "--node-grpc")

    @property
    def node_address(self) -> str:
        """Where nodes with a certificate connect."""
        host, _, port = self.grpc.rpartition(":")
        # Whoever leaves one to the kernel has several controllers on a machine.
        return self.node_grpc or f"{host}:{DEFAULT_NODE_PORT if int(port) else 0}"

    def _check_access(self) -> None:
        if self.client_certificates and self.tls_dir is None:
            raise ValueError("--client-certificates goes with --tls-dir")
        if self.client_certificates and self.kube is not None:
            raise ValueError(
                "--client-certificates takes a certificate for each node, which the agents of "
                "--kube-namespace have not; give --tokens-file"
            )
        if self.client_certificates and self.local_nodes + self.standby:
            raise ValueError(
                "--client-certificates takes a certificate for each node: start the controller "
                "alone (`outlast controller`), and each node with `outlast agent --tls-dir`"
            )
        if self.insecure:
            return
        asks_clients = self.tokens_file is not None or self.client_certificates
        needed = [
            option
            for option, is_given in (
                ("--tls-dir DIR (`outlast certs`)", self.tls_dir is not None),
                ("--tokens-file FILE (`outlast tokens`)", asks_clients),
                ("--join-token-file FILE", self.token_file is not None or not asks_clients),
            )
            if not is_given
        ]
        served = {"grpc": self.grpc, "http": self.http, "node-grpc": self.node_address}
        open_to = [
            f"--{name} {served[name]}"
            for name, is_served in (
                ("grpc", True),
                ("http", self.open_http),
                ("node-grpc", self.node_ca is not None),
            )
            if is_served and not is_loopback(parse_address(served[name], f"--{name}")[0])
        ]
        if open_to and needed:
            raise ValueError(
                f"{' and '.join(open_to)}: anyone who reaches it could run programs on every node. "
                f"Give {' and '.join(needed)}; or listen on 127.0.0.1, or say --insecure-i-know"
            )

    @property
    def agent_options(self) -> tuple[str, ...]:
        """Options that agents started by this controller inherit."""
        given: list[str] = []
        if self.log_format is not LogFormat.PRETTY:
            given += ["--log-format", self.log_format]
        if self.otlp_endpoint:
            given += ["--otlp-endpoint", self.otlp_endpoint]
        return tuple(given)

    @property
    def scheme(self) -> str:
        """How page and API are asked."""
        return "http" if self.tls_dir is None else "https"

    @property
    def is_http_open(self) -> bool:
        """Whether page and API answer others than this machine: with a login they do."""
        return self.open_http or (self.tls_dir is not None and self.tokens_file is not None)

    @property
    def token_file(self) -> Path | None:
        """The file of join tokens; None when agents need none.

        Where callers are asked who they are, agents are, too. On Kubernetes their pods have it
        from a Secret, so that it must be given.
        """
        if self.join_token_file is not None:
            return self.join_token_file.resolve()
        is_asked = self.tokens_file is not None or self.client_certificates
        is_asked = is_asked or self.node_ca is not None
        if self.local_nodes + self.standby or (is_asked and self.kube is None):
            return self.state_dir.resolve() / join_token.FILE_NAME
        return None
