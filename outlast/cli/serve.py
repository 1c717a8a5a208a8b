"""`outlast up`, `controller` and `agent`: the long-running processes, in the foreground."""

from __future__ import annotations

import logging
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import kube
from outlast.cli.errors import CliError
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import StateDir
from outlast.cli.specfile import EXAMPLE

if TYPE_CHECKING:
    from controller.app import Options, Running
    from controller.kube.config import KubeConfig

Grpc = Annotated[
    str,
    typer.Option("--grpc", metavar="HOST:PORT", help="Serve gRPC here; port 0 takes a free one."),
]
Http = Annotated[
    str,
    typer.Option(
        "--http", metavar="HOST:PORT", help="Serve /metrics and /healthz here; port 0: any."
    ),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="Forget all jobs and nodes, and host memory of local ones; checkpoints stay.",
    ),
]
_EXAMPLE = "examples/gpt-tiny.yaml"
JoinTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--join-token-file",
        envvar="OUTLAST_JOIN_TOKEN_FILE",
        metavar="FILE",
        help="A token that agents must show to join; a fresh one is written if FILE is missing.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="OUTLAST_CONFIG",
        metavar="FILE",
        help="Configuration of the controller (YAML): what it keeps of ended jobs.",
    ),
]
DEFAULT_GRPC = "127.0.0.1:7070"
DEFAULT_HTTP = "127.0.0.1:7071"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    state_dir: Path
    grpc: str
    http: str
    fresh: bool
    config: Path | None = None
    nodes: int = 0
    workers_per_node: int = 1
    standby: int = 0
    kube: KubeConfig | None = None
    observe: bool = False
    join_token_file: Path | None = None


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(up)
    app.command()(controller)
    app.command()(agent)


def up(
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, help="Local nodes for jobs.")
    ] = 4,
    workers_per_node: Annotated[
        int,
        typer.Option("--workers-per-node", metavar="N", min=1, help="Ranks that a node can run."),
    ] = 2,
    standby: Annotated[
        int, typer.Option("--standby", metavar="N", min=0, help="Spare local nodes.")
    ] = 1,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    grpc: Grpc = DEFAULT_GRPC,
    http: Http = DEFAULT_HTTP,
    fresh: Fresh = False,
    config: ConfigFile = None,
    observe: Annotated[
        bool,
        typer.Option("--observe", help="Start Prometheus beside it, where it is installed."),
    ] = False,
) -> None:
    """Start a controller and local nodes in the foreground.

    Ctrl-C stops everything within seconds; the next `outlast up` on the same
    state folder goes on with the jobs that were running.
    """
    _run(
        _Wanted(
            state_dir=state_dir,
            grpc=grpc,
            http=http,
            fresh=fresh,
            config=config,
            nodes=nodes,
            workers_per_node=workers_per_node,
            standby=standby,
            observe=observe,
        )
    )


def controller(
    state_dir: StateDir = DEFAULT_STATE_DIR,
    grpc: Grpc = DEFAULT_GRPC,
    http: Http = DEFAULT_HTTP,
    fresh: Fresh = False,
    config: ConfigFile = None,
    join_token_file: JoinTokenFile = None,
    kube_namespace: kube.Namespace = "",
    kube_image: kube.Image = "",
    kube_fleet: kube.Fleet = "outlast",
    kube_workers: kube.Workers = 8,
    kube_device: kube.Device = "nvidia.com/gpu",
    kube_devices: kube.Devices = -1,
    kube_controller: kube.AgentsDial = "",
    kube_shared_memory: kube.SharedMemory = "16Gi",
    kube_state_size: kube.StateSize = "32Gi",
    kube_join_token: kube.JoinToken = "",
    kube_pod_template: kube.PodTemplate = None,
    kube_condition: kube.Conditions = None,
    kube_config: kube.ConfigFile = None,
    kube_idle_s: kube.IdleS = 300.0,
) -> None:
    """Start a controller alone; `outlast agent` joins it.

    With --kube-namespace it takes its nodes from a Kubernetes cluster: it starts an agent in a pod
    on each host that jobs need, closes bad hosts, and gives idle ones back.
    """
    cluster = kube.cluster(
        namespace=kube_namespace,
        image=kube_image,
        fleet=kube_fleet,
        workers=kube_workers,
        device=kube_device,
        devices=kube_devices,
        agents_dial=kube_controller,
        shared_memory=kube_shared_memory,
        state_size=kube_state_size,
        join_token_secret=kube_join_token,
        pod_template=kube_pod_template,
        conditions=kube_condition,
        config_file=kube_config,
        idle_s=kube_idle_s,
        grpc=grpc,
    )
    if cluster is not None and bool(join_token_file) != bool(kube_join_token):
        raise CliError(
            "--join-token-file and --kube-join-token go together: the first is what this "
            "controller asks for, the second the Secret from which agents' pods have it"
        )
    _run(
        _Wanted(
            state_dir=state_dir,
            grpc=grpc,
            http=http,
            fresh=fresh,
            config=config,
            kube=cluster,
            join_token_file=join_token_file,
        )
    )


def agent(
    controller_address: Annotated[
        str,
        typer.Option(
            "--controller",
            envvar="OUTLAST_CONTROLLER",
            metavar="HOST:PORT",
            help="The controller to join.",
        ),
    ],
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Ranks this node can run.")
    ],
    node: Annotated[
        str, typer.Option("--node", metavar="NAME", help="This node's name; by default its host's.")
    ] = "",
    address: Annotated[
        str, typer.Option("--address", metavar="HOST", help="Where other nodes reach this one.")
    ] = "127.0.0.1",
    metrics_port: Annotated[
        int,
        typer.Option(
            "--metrics-port", metavar="PORT", min=-1, help="Serve metrics here; 0: any, -1: not."
        ),
    ] = -1,
    join_token_file: Annotated[
        Path | None,
        typer.Option(
            "--join-token-file",
            envvar="OUTLAST_JOIN_TOKEN_FILE",
            metavar="FILE",
            help="What the controller wants to see; by default that of a controller with the same "
            "--state-dir.",
        ),
    ] = None,
    rank_log_mib: Annotated[
        int,
        typer.Option(
            "--rank-log-mib",
            metavar="MIB",
            min=1,
            help="Limit of one rank's log; older output is deleted.",
        ),
    ] = 64,
    state_mib: Annotated[
        int,
        typer.Option(
            "--state-mib",
            metavar="MIB",
            min=64,
            help="Limit of the logs and black boxes of all attempts; the oldest are deleted.",
        ),
    ] = 4096,
    state_dir: Annotated[
        Path,
        typer.Option(
            "--state-dir",
            envvar="OUTLAST_STATE_DIR",
            metavar="DIR",
            help="Where this node keeps logs and what it needs to go on after a restart.",
        ),
    ] = DEFAULT_STATE_DIR,
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
    arguments += ["--address", address]
    arguments += ["--rank-log-mib", str(rank_log_mib), "--state-mib", str(state_mib)]
    beside = state_dir.expanduser() / FILE_NAME
    if join_token_file is not None or beside.exists():
        arguments += ["--join-token-file", str(join_token_file or beside)]
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


def _run(wanted: _Wanted) -> None:
    from controller import app, config_file
    from outlast.cli import observe as observing

    try:
        options = app.Options(
            state_dir=wanted.state_dir.expanduser(),
            grpc=wanted.grpc,
            http=wanted.http,
            local_nodes=wanted.nodes,
            workers_per_node=wanted.workers_per_node,
            standby=wanted.standby,
            fresh=wanted.fresh,
            kube=wanted.kube,
            join_token_file=wanted.join_token_file,
            retention=config_file.read_or_default(wanted.config).retention,
        )
    except ValueError as error:
        raise CliError(str(error)) from error
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )

    prometheus = None
    if wanted.observe:
        program = observing.find_prometheus()
        prometheus = observing.Prometheus(program, options.state_dir / "prometheus")

    def say_ready(running: Running) -> None:
        for line in ready_lines(options, running):
            print(line, flush=True)
        if prometheus is not None:
            interval_s = observing.SCRAPE_INTERVAL_S
            prometheus.start(observing.configuration(running.http, interval_s=interval_s))
            prometheus.tell_when_ready()

    try:
        code = app.main(options, say_ready)
    finally:
        if prometheus is not None:
            prometheus.stop()
    if code:
        raise typer.Exit(code)


def ready_lines(options: Options, running: Running) -> list[str]:
    """What a person who started a controller wants to know next."""
    default = DEFAULT_STATE_DIR.expanduser()
    found = "" if options.state_dir == default else f" --state-dir {options.state_dir}"
    lines = [f"Outlast listens at {running.grpc} (metrics at http://{running.http}/metrics)."]
    if options.local_nodes:
        lines += _local_lines(options, running)
    elif options.kube is not None:
        lines.append(f"Nodes come from the Kubernetes namespace {options.kube.namespace}.")
    else:
        token = options.token_file
        shown = "" if token is None else f" --join-token-file {token}"
        lines.append(
            f"Add nodes with: outlast agent --controller {running.grpc} --workers N{shown}"
        )
    # In a clone of the repository, as its pages have it; else where the package has it.
    example = _EXAMPLE if Path(_EXAMPLE).is_file() else shlex.quote(str(EXAMPLE))
    lines.append(f"Train with: outlast submit {example} --watch{found}")
    if options.kube is None:
        lines.append("Ctrl-C stops everything; the next start goes on with the jobs.")
    else:
        lines.append("Ctrl-C stops the controller only; agents and training go on.")
    return lines


def _local_lines(options: Options, running: Running) -> list[str]:
    if not running.adopted:
        return [
            f"{options.local_nodes} local node(s) of {options.workers_per_node} worker(s) and "
            f"{options.standby} standby are starting."
        ]
    starting = options.local_nodes + options.standby - running.adopted - len(running.dead)
    lines = [
        f"{running.adopted} local node(s) run on from before, {max(0, starting)} are starting."
    ]
    if running.dead:
        lines.append(
            f"Dead: {', '.join(running.dead)}; Ctrl-C here and then `outlast up` brings back all."
        )
    return lines
