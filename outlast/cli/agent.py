"""`outlast agent`: one node of a controller that runs elsewhere, in the foreground."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import LogFormatOption, OtlpEndpoint
from outlast.log_format import LogFormat

ControllerToJoin = Annotated[
    str,
    typer.Option(
        "--controller",
        envvar="OUTLAST_CONTROLLER",
        metavar="HOST:PORT",
        help="The controller to join; several with commas, where another one may take over.",
    ),
]
Workers = Annotated[
    int, typer.Option("--workers", metavar="N", min=1, help="Ranks this node can run.")
]
Node = Annotated[
    str, typer.Option("--node", metavar="NAME", help="This node's name; by default its host's.")
]
Address = Annotated[
    str, typer.Option("--address", metavar="HOST", help="Where other nodes reach this one.")
]
MetricsPort = Annotated[
    int,
    typer.Option(
        "--metrics-port", metavar="PORT", min=-1, help="Serve metrics here; 0: any, -1: not."
    ),
]
JoinTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--join-token-file",
        envvar="OUTLAST_JOIN_TOKEN_FILE",
        metavar="FILE",
        help="What the controller wants to see; by default that of a controller with the same "
        "--state-dir.",
    ),
]
TlsDir = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        metavar="DIR",
        help="ca.crt of the authority that signed the controller's certificate, and tls.crt and "
        "tls.key of this node where the controller asks for certificates.",
    ),
]
Topology = Annotated[
    str,
    typer.Option(
        "--topology",
        envvar="OUTLAST_TOPOLOGY",
        metavar="DOMAIN/…",
        help="Where this node stands, outermost first, as in block-1/rack-7: jobs get nodes that "
        "are near to each other.",
    ),
]
RankLogMib = Annotated[
    int,
    typer.Option(
        "--rank-log-mib",
        metavar="MIB",
        min=1,
        help="Limit of one rank's log; older output is deleted.",
    ),
]
StateMib = Annotated[
    int,
    typer.Option(
        "--state-mib",
        metavar="MIB",
        min=64,
        help="Limit of the logs and black boxes of all attempts; the oldest are deleted.",
    ),
]
StateDays = Annotated[
    int,
    typer.Option(
        "--state-days",
        metavar="DAYS",
        min=1,
        help="Limit of their age, since they were last written to.",
    ),
]
NodeStateDir = Annotated[
    Path,
    typer.Option(
        "--state-dir",
        envvar="OUTLAST_STATE_DIR",
        metavar="DIR",
        help="Where this node keeps logs and what it needs to go on after a restart.",
    ),
]


def agent(
    controller_address: ControllerToJoin,
    workers: Workers,
    node: Node = "",
    address: Address = "127.0.0.1",
    metrics_port: MetricsPort = -1,
    join_token_file: JoinTokenFile = None,
    tls_dir: TlsDir = None,
    topology: Topology = "",
    rank_log_mib: RankLogMib = 64,
    state_mib: StateMib = 4096,
    state_days: StateDays = 90,
    state_dir: NodeStateDir = DEFAULT_STATE_DIR,
    log_format: LogFormatOption = LogFormat.PRETTY,
    otlp_endpoint: OtlpEndpoint = "",
) -> None:
    """Run the agent of one node in the foreground.

    It keeps logs below --state-dir and host-memory checkpoints in /dev/shm, and
    finds what it left there when it is started again.
    """
    from controller.agent.__main__ import main
    from controller.join_token import FILE_NAME

    name = node or socket.gethostname().partition(".")[0].lower()
    arguments = agent_arguments(name, state_dir.expanduser().resolve())
    arguments += ["--controller", controller_address, "--workers", str(workers)]
    arguments += ["--address", address, "--topology", topology]
    arguments += ["--rank-log-mib", str(rank_log_mib)]
    arguments += ["--log-format", log_format, "--otlp-endpoint", otlp_endpoint]
    arguments += ["--state-mib", str(state_mib), "--state-days", str(state_days)]
    beside = state_dir.expanduser() / FILE_NAME
    if join_token_file is not None or beside.exists():
        arguments += ["--join-token-file", str(join_token_file or beside)]
    if tls_dir is not None:
        arguments += ["--tls-dir", str(tls_dir)]
    if metrics_port >= 0:
        arguments += ["--metrics-port", str(metrics_port)]
    raise typer.Exit(main(arguments))


def agent_arguments(node: str, state_dir: Path) -> list[str]:
    """A node's name and folders; the same ones that `outlast up` gives its own nodes."""
    from controller.local.cluster import LocalConfig

    local = LocalConfig(state_dir=state_dir, nodes=1, workers_per_node=1, controller_address="")
    return [
        *("--node", node),
        *("--state-dir", str(state_dir / "nodes" / node)),
        *("--memory-dir", str(local.memory_dir / node)),
        *("--data-dir", str(state_dir / "data")),
    ]
