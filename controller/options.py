"""What one controller is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from controller import join_token
from controller.addresses import DEFAULT_GRPC, DEFAULT_HTTP, parse_address
from controller.core.context import Settings
from controller.core.retention import Retention
from controller.kube.config import KubeConfig
from controller.notify.settings import NOBODY, Notify
from outlast.code.digest import DEFAULT_MAX_BYTES
from outlast.startup import python_command


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
    kube: KubeConfig | None = None
    """The Kubernetes cluster that nodes come from; it has none of local nodes then."""
    fresh: bool = False
    """Forget the jobs, end what runs, and empty the host memory of local nodes first."""
    stop_with_stdin: bool = False
    """Stop when standard input ends, as it does with the program that started this one, and leave
    nothing in the host memory of local nodes."""
    join_token_file: Path | None = None
    """What agents must show; made when it is missing. With local nodes there is always one."""
    settings: Settings = field(default_factory=Settings)
    """Bounds of the fleet as a whole."""
    retention: Retention = field(default_factory=Retention)
    """What is kept of ended jobs."""
    notify: Notify = NOBODY
    """Who is told of incidents and ends of jobs."""
    max_code_bytes: int = DEFAULT_MAX_BYTES
    """How large the archive of a job's code may be."""
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
