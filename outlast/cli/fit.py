"""Whether a job fits the connected nodes, as `plan` and `submit` say it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.cli.connect import LOOK_TIMEOUT_S, find_controller
from outlast.cli.errors import CliError

if TYPE_CHECKING:
    from outlast.v1.jobs_pb2 import CheckFitResponse


def asked_fit(document: dict[str, Any], controller: str, state_dir: Path) -> CheckFitResponse | str:
    """What the controller says, or why it was not asked."""
    from outlast.errors import OutlastError
    from outlast.problems import SpecError

    try:
        found = find_controller(controller, state_dir)
    except CliError:
        return "no controller was asked, as none runs here: see --controller"
    try:
        with found.client() as client:
            return client.check_fit(document, timeout_s=LOOK_TIMEOUT_S)
    except SpecError as error:
        # An older or newer controller, which knows other fields.
        return f"the controller at {found.address} does not take the spec: {error}"
    except OutlastError as error:
        return f"the controller at {found.address} could not check it: {error}"


def fit_line(fit: CheckFitResponse | str) -> str:
    """How the job fits, in one line."""
    if isinstance(fit, str):
        return fit
    needs = _needs(fit)
    if not fit.connected:
        return f"none is connected; {needs}"
    return f"{fit.fitting} of {fit.connected} connected fit; {needs}; connected nodes: {fit.nodes}"


def fit_warnings(fit: CheckFitResponse | str) -> list[str]:
    """What no connected node has, and what becomes of the job."""
    if isinstance(fit, str):
        return []
    problems = [f"{each.field} {each.description}" for each in fit.problems]
    if fit.connected and not problems:
        problems = missing_nodes(fit, "would wait")
    elif problems and fit.brings_nodes:
        problems.append("the job would wait in the queue for nodes that the cluster brings")
    elif problems:
        problems.append(
            "`outlast submit` refuses the job while no connected node has what it needs; "
            "--wait-for-nodes queues it anyway"
        )
    return problems


def missing_nodes(fit: CheckFitResponse, waits: str) -> list[str]:
    """That too few nodes are there for the job to start, and what to do about it."""
    if fit.fitting >= fit.needed:
        return []
    remedy = (
        "the cluster brings nodes by itself"
        if fit.brings_nodes
        else "`outlast agent --controller HOST:PORT` on a machine adds it as a node"
    )
    if not fit.connected:
        return [f"no nodes are connected, and {_needs(fit)}: it {waits} in the queue; {remedy}"]
    there = f"{fit.connected} {'node is' if fit.connected == 1 else 'nodes are'} connected"
    if fit.fitting < fit.connected:
        there = f"{fit.fitting} of {fit.connected} connected nodes have what the job needs"
    return [f"{there}, and {_needs(fit)}: it {waits} for the others; {remedy}"]


def _needs(fit: CheckFitResponse) -> str:
    nodes = "1 node" if fit.needed == 1 else f"{fit.needed} nodes"
    return f"the job needs {nodes} with {fit.need}{'' if fit.needed == 1 else ' each'}"
