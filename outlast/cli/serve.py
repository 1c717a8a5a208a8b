"""`outlast up` and `outlast controller`: a controller in the foreground."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import kube, node_certificates
from outlast.cli.agent import agent
from outlast.cli.errors import bad_input
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import LogFormatOption, OtlpEndpoint, StateDir
from outlast.cli.specfile import EXAMPLE
from outlast.log_format import LogFormat, set_up

if TYPE_CHECKING:
    import sqlalchemy

    from controller.app import Running
    from controller.options import Options

Grpc = Annotated[
    str,
    typer.Option("--grpc", metavar="HOST:PORT", help="Serve gRPC here; port 0 takes a free one."),
]
Http = Annotated[
    str,
    typer.Option(
        "--http",
        metavar="HOST:PORT",
        help="Serve the web page, its API, /metrics, /healthz and /readyz here; port 0: any.",
    ),
]
OpenHttp = Annotated[
    bool,
    typer.Option(
        "--open-http",
        help="Answer the web page and its API to everyone who reaches --http, not only to this "
        "machine: they can submit jobs.",
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
        help="Configuration of the controller (YAML): what it keeps, whom it notifies, how large "
        "code may be.",
    ),
]
TlsDir = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        metavar="DIR",
        help="Encrypt gRPC and HTTP: tls.crt, tls.key and ca.crt, as `outlast certs issue` and "
        "cert-manager write them.",
    ),
]
TokensFile = Annotated[
    Path | None,
    typer.Option(
        "--tokens-file",
        metavar="FILE",
        help="Ask callers for a token, of those that `outlast tokens add` put into this file.",
    ),
]
ClientCertificates = Annotated[
    bool,
    typer.Option(
        "--client-certificates",
        help="Let nobody connect to --grpc without a certificate of the authority in --tls-dir.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure-i-know",
        help="Listen beyond this machine without encryption or login: everyone who reaches the "
        "port can run programs on every node.",
    ),
]
Observe = Annotated[
    bool, typer.Option("--observe", help="Start Prometheus beside it, where it is installed.")
]
StopWithStdin = Annotated[
    bool,
    typer.Option(
        "--stop-with-stdin",
        help="Stop when standard input ends, which it does with the program that has started "
        "this one with a pipe; leave nothing in host memory.",
    ),
]
Journal = Annotated[
    str,
    typer.Option(
        "--journal",
        envvar="OUTLAST_JOURNAL",
        metavar="URL",
        help="Keep the journal in this PostgreSQL database, such as "
        "postgresql+psycopg://outlast@db.example/outlast; by default in a file in --state-dir.",
    ),
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait",
        help="While another controller uses --state-dir or --journal, wait, and answer probes at "
        "--http; take over when it ends or dies.",
    ),
]
DEFAULT_GRPC = "127.0.0.1:7070"
DEFAULT_HTTP = "127.0.0.1:7071"


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
    open_http: OpenHttp = False,
    tls_dir: TlsDir = None,
    tokens_file: TokensFile = None,
    insecure: Insecure = False,
    fresh: Fresh = False,
    config: ConfigFile = None,
    log_format: LogFormatOption = LogFormat.PRETTY,
    otlp_endpoint: OtlpEndpoint = "",
    observe: Observe = False,
    stop_with_stdin: StopWithStdin = False,
) -> None:
    """Start a controller and local nodes in the foreground.

    Ctrl-C stops everything within seconds; the next `outlast up` on the same
    state folder goes on with the jobs that were running.
    """
    options = _options(
        config,
        **_common(state_dir, grpc, http, open_http, tls_dir, tokens_file, insecure, fresh),
        local_nodes=nodes,
        workers_per_node=workers_per_node,
        standby=standby,
        stop_with_stdin=stop_with_stdin,
        **_output(log_format, otlp_endpoint),
    )
    _run(options, observe=observe)


def controller(
    ctx: typer.Context,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    journal: Journal = "",
    wait: Wait = False,
    grpc: Grpc = DEFAULT_GRPC,
    http: Http = DEFAULT_HTTP,
    open_http: OpenHttp = False,
    tls_dir: TlsDir = None,
    tokens_file: TokensFile = None,
    client_certificates: ClientCertificates = False,
    node_ca: node_certificates.NodeCa = None,
    node_grpc: node_certificates.NodeGrpc = "",
    node_cert_hours: node_certificates.NodeCertHours = 24.0,
    insecure: Insecure = False,
    fresh: Fresh = False,
    config: ConfigFile = None,
    log_format: LogFormatOption = LogFormat.PRETTY,
    otlp_endpoint: OtlpEndpoint = "",
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
    kube_ca: kube.CaSecret = "",
    kube_pod_template: kube.PodTemplate = None,
    kube_condition: kube.Conditions = None,
    kube_topology: kube.Topology = None,
    kube_training_jobs: kube.TrainingJobs = False,
    kube_queue: kube.Queue = "",
    kube_config: kube.ConfigFile = None,
    kube_idle_s: kube.IdleS = 300.0,
) -> None:
    """Start a controller alone; `outlast agent` joins it.

    With --kube-namespace it starts agents' pods on hosts as jobs need them, and closes bad hosts.
    """
    options = _options(
        config,
        **_common(state_dir, grpc, http, open_http, tls_dir, tokens_file, insecure, fresh),
        **_output(log_format, otlp_endpoint),
        **_alone(ctx, grpc, join_token_file, tls_dir),
    )
    _run(options)


def _alone(
    ctx: typer.Context, grpc: str, join_token_file: Path | None, tls_dir: Path | None
) -> dict[str, Any]:
    """What only `controller` takes: of a cluster, of who may join, of where state is kept."""
    given = ctx.params
    return {
        "kube": kube.cluster_of(given, grpc, join_token_file, tls_dir),
        "join_token_file": join_token_file,
        "client_certificates": given["client_certificates"],
        "node_ca": given["node_ca"],
        "node_grpc": given["node_grpc"],
        "node_certificate_hours": given["node_cert_hours"],
        "wait": given["wait"],
        "journal": _journal(given["journal"]),
    }


def _output(log_format: LogFormat, otlp_endpoint: str) -> dict[str, Any]:
    """How both say what they do."""
    return {"log_format": log_format, "otlp_endpoint": otlp_endpoint}


def _journal(url: str) -> sqlalchemy.URL | None:
    from controller.store.postgres import parse_url

    with bad_input():
        return parse_url(url) if url else None


def _common(
    state_dir: Path,
    grpc: str,
    http: str,
    open_http: bool,
    tls_dir: Path | None,
    tokens_file: Path | None,
    insecure: bool,
    fresh: bool,
) -> dict[str, Any]:
    """What `up` and `controller` both take."""
    return {
        "state_dir": state_dir.expanduser(),
        "grpc": grpc,
        "http": http,
        "open_http": open_http,
        "tls_dir": tls_dir,
        "tokens_file": tokens_file,
        "insecure": insecure,
        "fresh": fresh,
    }


def _options(config: Path | None, **given: Any) -> Options:
    """What was given on the command line, and in the file."""
    from controller.config_file import read_or_default
    from controller.options import Options
    from outlast.cli.plan_document import plan_document

    with bad_input():
        configuration = read_or_default(config)
        return Options(
            **given,
            retention=configuration.retention,
            max_code_bytes=configuration.max_code_bytes,
            notify=configuration.notify,
            settings=configuration.settings,
            plan_job=plan_document,
        )


def _run(options: Options, *, observe: bool = False) -> None:
    from controller import app
    from controller.addresses import reachable
    from outlast.cli import observe as observing

    set_up(options.log_format)
    prometheus = None
    if observe:
        program = observing.find_prometheus()
        prometheus = observing.Prometheus(program, options.state_dir / "prometheus")

    def say_ready(running: Running) -> None:
        # The log says where it listens, too.
        lines = ready_lines(options, running) if options.log_format is LogFormat.PRETTY else []
        for line in lines:
            print(line, flush=True)
        if prometheus is not None:
            interval_s = observing.SCRAPE_INTERVAL_S
            from outlast.access import CA_FILE

            ca_file = None if options.tls_dir is None else (options.tls_dir / CA_FILE).resolve()
            prometheus.start(
                observing.configuration(
                    reachable(running.http), interval_s=interval_s, ca_file=ca_file
                )
            )
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
    from controller.addresses import reachable
    from outlast.access import logins_file, read_logins

    default = DEFAULT_STATE_DIR.expanduser()
    found = "" if options.state_dir == default else f" --state-dir {options.state_dir}"
    if not found and read_logins(logins_file()).current:
        # Commands would mean the controller that this person has logged in to.
        found = f" --controller {reachable(running.grpc)}"
    lines = [
        f"Outlast listens at {running.grpc}.",
        f"Watch it at {options.scheme}://{reachable(running.http)} (metrics at /metrics).",
    ]
    if options.local_nodes:
        lines += _local_lines(options, running)
    elif options.kube is not None:
        lines.append(f"Nodes come from the Kubernetes namespace {options.kube.namespace}.")
    else:
        token = options.token_file
        shown = "" if options.tls_dir is None else " --tls-dir DIR"
        shown += "" if token is None else f" --join-token-file {token}"
        # On other machines it has another name.
        is_everywhere = reachable(running.grpc) != running.grpc
        address = f"HOST:{running.grpc.rpartition(':')[2]}" if is_everywhere else running.grpc
        lines.append(f"Add nodes with: outlast agent --controller {address} --workers N{shown}")
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
