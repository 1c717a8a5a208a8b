"""The options of `outlast controller` about certificates that it signs for nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NodeCa = Annotated[
    Path | None,
    typer.Option(
        "--node-ca",
        metavar="DIR",
        help="Sign a short-lived certificate for each agent that shows the join token, and renew "
        "it: ca.crt and ca.key, as `outlast certs init` writes them, of an authority for nodes "
        "alone.",
    ),
]
NodeGrpc = Annotated[
    str,
    typer.Option(
        "--node-grpc",
        metavar="HOST:PORT",
        help="Where agents with such a certificate connect; by default port 7072 at the host of "
        "--grpc.",
    ),
]
NodeCertHours = Annotated[
    float,
    typer.Option(
        "--node-cert-hours",
        metavar="HOURS",
        help="How long such a certificate holds; agents renew it after two thirds.",
    ),
]
