"""`python -m controller`: a controller, and local nodes if asked for, until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from controller import app, config_file
from controller.addresses import DEFAULT_GRPC, DEFAULT_HTTP
from controller.options import Options
from controller.store.postgres import parse_url
from outlast.log_format import LogFormat, set_up
from outlast.startup import check_packages


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m controller", description=__doc__)
    parser.add_argument("--state-dir", required=True, type=Path, help="journal, logs, checkpoints")
    parser.add_argument("--journal", metavar="URL", help="the journal in PostgreSQL")
    parser.add_argument("--grpc", default=DEFAULT_GRPC, metavar="HOST:PORT")
    parser.add_argument("--http", default=DEFAULT_HTTP, metavar="HOST:PORT")
    parser.add_argument(
        "--open-http", action="store_true", help="the page answers others than this machine, too"
    )
    parser.add_argument("--local-nodes", type=int, default=0, help="nodes to run here")
    parser.add_argument("--workers-per-node", type=int, default=1)
    parser.add_argument("--standby", type=int, default=0, help="local nodes on top, as spares")
    parser.add_argument("--join-token-file", type=Path, help="what agents must show to join")
    parser.add_argument("--tls-dir", type=Path, help="tls.crt, tls.key and ca.crt")
    parser.add_argument("--node-ca", type=Path, help="ca.crt and ca.key: signs for nodes")
    parser.add_argument("--node-grpc", default="", metavar="HOST:PORT", help="for those nodes")
    parser.add_argument("--node-cert-hours", type=float, default=24.0, help="how long they hold")
    parser.add_argument("--tokens-file", type=Path, help="who may call, in which role")
    parser.add_argument(
        "--client-certificates", action="store_true", help="nobody connects to gRPC without one"
    )
    parser.add_argument(
        "--insecure-i-know", action="store_true", help="listen beyond this machine without either"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML: code, notify, queue, retention"
    )
    parser.add_argument(
        "--wait", action="store_true", help="wait while another uses the journal, then take over"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="forget jobs, nodes and host memory first"
    )
    parser.add_argument("--otlp-endpoint", default="", metavar="URL", help="export logs there")
    parser.add_argument("--log-format", choices=[*LogFormat], default=LogFormat.PRETTY)
    # For tests: what runs in the place of an agent.
    parser.add_argument("--agent-command", help=argparse.SUPPRESS)
    return parser


def parse(arguments: list[str] | None) -> Options:
    """What the command line says; ValueError for values that make no sense."""
    given = _parser().parse_args(arguments)
    configuration = config_file.read_or_default(given.config)
    options = Options(
        state_dir=given.state_dir,
        journal=None if given.journal is None else parse_url(given.journal),
        grpc=given.grpc,
        http=given.http,
        open_http=given.open_http,
        local_nodes=given.local_nodes,
        workers_per_node=given.workers_per_node,
        standby=given.standby,
        wait=given.wait,
        fresh=given.fresh,
        join_token_file=given.join_token_file,
        tls_dir=given.tls_dir,
        node_ca=given.node_ca,
        node_grpc=given.node_grpc,
        node_certificate_hours=given.node_cert_hours,
        tokens_file=given.tokens_file,
        client_certificates=given.client_certificates,
        insecure=given.insecure_i_know,
        retention=configuration.retention,
        notify=configuration.notify,
        settings=configuration.settings,
        max_code_bytes=configuration.max_code_bytes,
        log_format=LogFormat(given.log_format),
        otlp_endpoint=given.otlp_endpoint,
    )
    if given.agent_command:
        return replace(options, agent_command=tuple(shlex.split(given.agent_command)))
    return options


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        check_packages()
        options = parse(arguments)
        set_up(options.log_format)
    except ValueError as error:
        print(f"outlast controller: {error}", file=sys.stderr)
        return app.EXIT_REFUSED
    return app.main(options)


if __name__ == "__main__":
    sys.exit(main())
