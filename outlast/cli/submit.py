"""`outlast submit`: a spec is checked, sent, and its job followed if wanted."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import output
from outlast.cli.connect import controller_of, where_nodes_are
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import Assignments, Controller, Json, SpecFile, StateDir
from outlast.cli.watch import follow_to_end

if TYPE_CHECKING:
    from outlast.cli.specfile import Checked
    from outlast.client import Client

Watch = Annotated[
    bool,
    typer.Option(
        "--watch", help="Follow the job to its end, also while it is paused; exit 1 if it fails."
    ),
]
RequestId = Annotated[
    str,
    typer.Option(
        "--request-id",
        metavar="ID",
        help="Submitting again with the same id and spec gives the job already made.",
    ),
]
WaitForNodes = Annotated[
    bool,
    typer.Option(
        "--wait-for-nodes", help="Queue the job even if no connected node has what it needs."
    ),
]

Code = Annotated[
    Path | None,
    typer.Option(
        "--code",
        metavar="DIR",
        help="Folder whose code the job runs, sent along; the same as workload.code.path.",
    ),
]


def submit(
    spec: SpecFile,
    set_: Assignments = [],  # noqa: B006
    code: Code = None,
    follow: Watch = False,
    request_id: RequestId = "",
    wait_for_nodes: WaitForNodes = False,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Submit a training job.

    The spec is checked first, with the files that it names as far as they can be seen from
    here. Relative paths in it are below the current folder.
    """
    from outlast.cli.specfile import load_spec

    given = [] if code is None else [f"workload.code.path={dumps(str(code))}"]
    checked = load_spec(spec, [*set_, *given], where_nodes_are(controller, state_dir))
    with controller_of(controller, state_dir) as client:
        job = client.submit(
            checked.document, request_id=request_id or None, wait_for_nodes=wait_for_nodes
        )
        if not json:
            # First: whatever happens from here on, the job is there.
            print(f"submitted {job.job_id}", flush=True)
        missing = _fit_warnings(client, checked.document)
    for line in (*checked.seen.warnings, *_not_read(checked), *missing):
        output.print_message(f"warning: {line}")
    if not json:
        for line in checked.resolved:
            output.print_wrapped(line)
        print(f"checkpoints: {job.checkpoint_url}", flush=True)
    elif not follow:
        output.print_json({"job": output.facts(job)})
    if follow:
        follow_to_end(job, controller, state_dir, json=json)


def _not_read(checked: Checked) -> list[str]:
    """Files that a person may have meant to train on."""
    from outlast.rules.data import PYTHON_STDLIB

    source = checked.seen.source
    return [] if source is None or source.name == PYTHON_STDLIB else source.left_out()


def _fit_warnings(client: Client, document: dict[str, Any]) -> list[str]:
    """What the connected nodes lack; nothing where the controller does not answer that."""
    from outlast.cli.fit import missing_nodes
    from outlast.errors import OutlastError

    try:
        fit = client.check_fit(document)
    except OutlastError:
        return []
    lacking = [f"{each.field} {each.description}; it waits in the queue" for each in fit.problems]
    return lacking or missing_nodes(fit, "waits")
