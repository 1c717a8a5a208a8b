"""Names of jobs, nodes and incidents for the shell's completion.

A shell waits for this with every press of a key: it is asked of the controller with a
short limit, and where none answers there is nothing to complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from outlast.cli.folders import DEFAULT_STATE_DIR

if TYPE_CHECKING:
    from outlast.client import Client

LIMIT_S = 2.0
_Found = TypeVar("_Found")


def jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names and ids of jobs."""
    listed = _asked(ctx, lambda client: [(job.name, job.job_id) for job in client.list()])
    return _begun((word for names in listed for word in names), incomplete)


def nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of nodes."""
    return _begun(_asked(ctx, lambda client: [node.node_id for node in client.nodes()]), incomplete)


def incidents(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of incidents."""
    found = _asked(ctx, lambda client: [item.incident_id for item in client.incidents(brief=True)])
    return _begun(found, incomplete)


def _begun(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]


def _asked(ctx: typer.Context, ask: Callable[[Client], list[_Found]]) -> list[_Found]:
    from outlast.cli.connect import find_controller
    from outlast.cli.errors import CliError
    from outlast.errors import OutlastError

    given = ctx.params
    controller = given.get("controller") or os.environ.get("OUTLAST_CONTROLLER", "")
    folder = given.get("state_dir") or os.environ.get("OUTLAST_STATE_DIR") or DEFAULT_STATE_DIR
    try:
        found = find_controller(str(controller), Path(folder))
        with found.client(longest_call_s=LIMIT_S) as client:
            return ask(client)
    except (CliError, OutlastError):
        return []
