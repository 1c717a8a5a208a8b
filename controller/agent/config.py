"""Options of one node agent, and the bounds it works within."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from controller.addresses import parse_address
from outlast.access import Access, read_tls_dir
from outlast.addresses import addresses_of
from outlast.log_format import LogFormat

# An incident quotes the end of a log, and `outlast logs` prints more of it.
MIN_RANK_LOG_BYTES = 1 << 20
# The newest attempt stays whatever its size.
MIN_STATE_BYTES = 64 << 20
MIN_STATE_AGE_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of everything that grows, and how long things may take."""

    max_buffered_events: int = 20_000
    """Events kept while no controller acknowledges them: 30 minutes at 10 a second, and spare."""
    standby_ready_s: float = 120.0
    """Importing torch takes seconds, and much longer where many nodes share two cores."""
    kill_s: float = 10.0
    """From SIGKILL until a process must be gone; only uninterruptible I/O takes that long."""
    absence_stop_s: float = 30.0
    """Graceful part of stopping workers that have had no controller for too long."""
    probe_s: float = 30.0
    """Writing, reading and deleting one small object in checkpoint storage."""
    code_s: float = 120.0
    """Fetching a job's code, where the controller restarts meanwhile and others fetch it, too."""
    shutdown_s: float = 2.0
    """Everything below the agent is gone so long after SIGTERM."""
    max_text_bytes: int = 64 * 1024
    """Of a traceback or a message sent to the controller."""
    stderr_tail_bytes: int = 8 * 1024
    """Of a dead worker's output sent to the controller."""
    max_log_queries: int = 32
    """Log queries answered at the same time."""
    max_check_orders: int = 64
    """Orders of diagnostic runs that wait for their turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """One node agent."""

    node: str
    controller: str
    """host:port of the controller's gRPC service, or several with commas: one of them leads."""
    state_dir: Path
    memory_dir: Path
    """On tmpfs: survives workers and the agent, not the node."""
    data_dir: Path
    workers: int
    address: str = "127.0.0.1"
    """Where other nodes reach rank 0's rendezvous on this one."""
    controller_file: Path | None = None
    """JSON with the controller's present `grpc` address, read before each connection."""
    join_token_file: Path | None = None
    """What the controller wants to see before it lets this agent in; read at each connection."""
    tls_dir: Path | None = None
    """ca.crt, which the controller's certificate must be signed by, and perhaps this node's own
    certificate; read at each connection. None: in clear text."""
    metrics_port: int | None = None
    """Port of the metrics page; 0 takes a free one, None serves none."""
    standby_arguments: tuple[str, ...] = ()
    """Handed on to `python -m trainer.worker.standby`."""
    rank_log_bytes: int = 64 << 20
    """Of one rank's log; what is older is deleted from its front."""
    state_bytes: int = 4 << 30
    """Of what all attempts leave in `jobs_dir`; the oldest is deleted."""
    state_age_s: float = 90 * 86_400.0
    """Since an attempt last wrote there; what is older is deleted."""
    image: str = ""
    """The job's image that this agent runs in; "" for the image of the agents."""
    topology: str = ""
    """Where the node stands, as "block-1/rack-7"; "" where nobody says that."""
    cgroups: bool = True
    """Give each worker a cgroup of its own where this node permits it."""
    log_format: LogFormat = LogFormat.PRETTY
    """Of what the agent writes about itself."""
    otlp_endpoint: str = ""
    """Where logs are exported to by OTLP; "" for what OpenTelemetry's variables say."""
    suite_runner: str = "diagnostics.runner"
    """Module that runs suites of checks."""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}; a node needs 1 or more")
        for address in self.controller_addresses:
            parse_address(address, "--controller")
        if not self.node or "/" in self.node:
            raise ValueError(f"node is {self.node!r}; it must be a name without '/'")

        if self.rank_log_bytes < MIN_RANK_LOG_BYTES:
            raise ValueError(
                f"rank_log_bytes is {self.rank_log_bytes}; at least {MIN_RANK_LOG_BYTES} (1 MiB)"
            )
        if self.state_bytes < MIN_STATE_BYTES:
            raise ValueError(
                f"state_bytes is {self.state_bytes}; at least {MIN_STATE_BYTES} (64 MiB)"
            )
        if self.state_age_s < MIN_STATE_AGE_S:
            raise ValueError(f"state_age_s is {self.state_age_s:g}; at least 86400 (1 day)")

    @property
    def controller_addresses(self) -> tuple[str, ...]:
        """Where the controller may be, in the order in which they are asked."""
        return addresses_of(self.controller)

    @property
    def access(self) -> Access:
        """What a connection to the controller is made with.

        Raises:
            AccessError: a file of it cannot be used.
        """
        return Access() if self.tls_dir is None else read_tls_dir(self.tls_dir)

    @property
    def is_loopback(self) -> bool:
        """Whether this node is reached through the loopback interface."""
        if self.address == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            return False

    @property
    def jobs_dir(self) -> Path:
        """What workers leave behind, by job and attempt."""
        return self.state_dir / "jobs"

    @property
    def code_dir(self) -> Path:
        """What jobs have brought along, by job."""
        return self.state_dir / "code"

    def attempt_dir(self, job_id: str, attempt: int) -> Path:
        """Where the workers of an attempt leave logs, errors and black boxes."""
        return self.jobs_dir / job_id / f"a{attempt}"

    def job_memory_dir(self, job_id: str) -> Path:
        """Host-memory checkpoints of a job on this node."""
        return self.memory_dir / job_id
