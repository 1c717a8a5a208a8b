"""Options and arguments that several commands share, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outlast.cli import completion
from outlast.log_format import LogFormat

Controller = Annotated[
    str,
    typer.Option(
        "--controller",
        envvar="OUTLAST_CONTROLLER",
        metavar="HOST:PORT",
        help="The controller's gRPC address, several with commas where another one may take over, "
        "or the name of a login; by default the login in use, else the one noted in --state-dir.",
    ),
]
StateDir = Annotated[
    Path,
    typer.Option(
        "--state-dir",
        envvar="OUTLAST_STATE_DIR",
        metavar="DIR",
        help="Where a controller on this machine keeps its state.",
    ),
]
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar="OUTLAST_LOG_FORMAT",
        metavar="FORMAT",
        help="How the log is written to standard error: pretty, or json, one object on each line.",
    ),
]
OtlpEndpoint = Annotated[
    str,
    typer.Option(
        "--otlp-endpoint",
        metavar="URL",
        help="Export logs there by OTLP (`pip install outlast[otlp]`); by default where "
        "OTEL_EXPORTER_OTLP_ENDPOINT says, if it is set.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
JobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Job id, name, or an unambiguous beginning of one.",
        autocompletion=completion.jobs,
    ),
]
AnyJobName = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Job id, name, or an unambiguous beginning of one; may be left out where one job "
        "exists or only one has not ended.",
        autocompletion=completion.jobs,
    ),
]
NodeName = Annotated[
    str, typer.Argument(metavar="NODE", help="Node id.", autocompletion=completion.nodes)
]
SpecFile = Annotated[
    Path, typer.Argument(metavar="SPEC", help="Job spec, YAML or JSON; '-' reads standard input.")
]
Assignments = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change one field of the spec, such as parallel.tp=4; may be repeated.",
    ),
]
