"""Whether a job fits the connected nodes, as `plan` and `submit` say it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.cli.connect import resolve_address
from outlast.cli.errors import CliError

if TYPE_CHECKING:
    from outlast.v1.jobs_pb2 import CheckFitResponse

# `plan` works without a controller, and does not wait long for one.
_TIMEOUT_S = 3.0


def asked_fit(document: dict[str, Any], controller: str, state_dir: Path) -> CheckFitResponse | str:
    """What the controller says, or why it was not asked."""
    from outlast.client import Client
    from outlast.errors import OutlastError
    from outlast.spec import SpecError

    try:
        address = resolve_address(controller, state_dir)
    except CliError:
        return "no controller was asked, as none runs here: see --controller"
    try:
        with Client(address) as client:
            return client.check_fit(document, timeout_s=_TIMEOUT_S)
    except SpecError as error:
        # An older or newer controller, which knows other fields.
        return f"the controller at {address} does not take the spec: {error}"
    except OutlastError:
        return f"the controller at {address} was asked and did not answer"


def fit_line(fit: CheckFitResponse | str) -> str:
    """How the job fits, in one line."""
    if isinstance(fit, str):
        return fit
    needs = f"the job takes {fit.needed} with {fit.need} each"
    if not fit.connected:
        return f"none is connected; {needs}"
    return f"{fit.fitting} of {fit.connected} connected fit; {needs}; connected are {fit.nodes}"


def fit_warnings(fit: CheckFitResponse | str) -> list[str]:
    """What no connected node has, and what becomes of the job."""
    if isinstance(fit, str):
        return []
    problems = [f"{each.field} {each.description}" for each in fit.problems]
    if fit.connected and fit.fitting < fit.needed and not problems:
        problems = [
            f"{fit.fitting} of {fit.connected} connected nodes have what the job needs, and it "
            f"takes {fit.needed}: it would wait in the queue for others"
        ]
    elif problems and fit.brings_nodes:
        problems.append("the job would wait in the queue for nodes that the cluster brings")
    elif problems:
        problems.append(
            "`outlast submit` refuses the job while no connected node has what it needs; "
            "--wait-for-nodes queues it all the same"
        )
    return problems
