"""`python -m controller.agent`: the agent of one node, until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from controller.agent.config import AgentConfig
from controller.agent.run import run_agent
from outlast.errors import OutlastError
from outlast.log_format import LogFormat, say_last, set_up
from outlast.startup import check_packages


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        check_packages()
        config = parse(arguments)
        set_up(config.log_format, {"node": config.node})
        asyncio.run(run_agent(config))
    except (OutlastError, ValueError) as error:
        say_last("outlast agent", error)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m controller.agent", description=__doc__)
    parser.add_argument("--node", required=True, help="name of this node")
    parser.add_argument("--controller", required=True, metavar="HOST:PORT[,...]")
    parser.add_argument("--state-dir", required=True, type=Path, help="logs, errors, black boxes")
    parser.add_argument("--memory-dir", required=True, type=Path, help="checkpoints, on tmpfs")
    parser.add_argument("--data-dir", required=True, type=Path, help="cache of tokenised data")
    parser.add_argument("--workers", required=True, type=int, help="ranks this node can run")
    parser.add_argument("--address", default="127.0.0.1", help="where other nodes reach this one")
    parser.add_argument(
        "--controller-file", type=Path, help="JSON with the controller's present grpc address"
    )
    parser.add_argument(
        "--join-token-file", type=Path, help="the join token, where the controller asks for one"
    )
    parser.add_argument(
        "--tls-dir", type=Path, help="ca.crt of the controller's authority, and our own certificate"
    )
    parser.add_argument("--metrics-port", type=int, help="serve metrics here; 0 takes a free port")
    parser.add_argument("--rank-log-mib", type=int, default=64, help="limit of one rank's log")
    parser.add_argument(
        "--state-mib", type=int, default=4096, help="limit of logs and black boxes of all attempts"
    )
    parser.add_argument(
        "--state-days", type=int, default=90, help="limit of their age, since last written to"
    )
    parser.add_argument(
        "--image", default="", help="the image of jobs that this agent runs in, if it is not ours"
    )
    parser.add_argument(
        "--topology",
        default="",
        metavar="DOMAIN/DOMAIN",
        help="where the node stands, outermost first, as in block-1/rack-7: jobs get nodes that "
        "are near to each other",
    )
    parser.add_argument("--otlp-endpoint", default="", metavar="URL", help="export logs there")
    parser.add_argument("--log-format", choices=[*LogFormat], default=LogFormat.PRETTY)
    # For tests: handed to the standby process as they are; another module of checks; a node that
    # does not permit cgroups.
    parser.add_argument("--standby-argument", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--suite-runner", default="diagnostics.runner", help=argparse.SUPPRESS)
    parser.add_argument("--no-cgroups", action="store_true", help=argparse.SUPPRESS)
    return parser


def parse(arguments: list[str] | None) -> AgentConfig:
    """What the command line says; ValueError when values do not fit together."""
    given = _parser().parse_args(arguments)
    return AgentConfig(
        node=given.node,
        controller=given.controller,
        state_dir=given.state_dir.resolve(),
        memory_dir=given.memory_dir.resolve(),
        data_dir=given.data_dir.resolve(),
        workers=given.workers,
        address=given.address,
        controller_file=given.controller_file,
        join_token_file=given.join_token_file,
        tls_dir=None if given.tls_dir is None else given.tls_dir.resolve(),
        metrics_port=given.metrics_port,
        standby_arguments=tuple(given.standby_argument),
        suite_runner=given.suite_runner,
        rank_log_bytes=given.rank_log_mib << 20,
        state_bytes=given.state_mib << 20,
        state_age_s=given.state_days * 86_400.0,
        image=given.image,
        topology=given.topology,
        cgroups=not given.no_cgroups,
        log_format=LogFormat(given.log_format),
        otlp_endpoint=given.otlp_endpoint,
    )


if __name__ == "__main__":
    sys.exit(main())
