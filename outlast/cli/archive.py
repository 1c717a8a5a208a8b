"""`outlast archive`: jobs that the controller has deleted from its list, in the archive."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from outlast.cli import describe, output
from outlast.cli.errors import CliError
from outlast.cli.options import Json
from outlast.cli.usage import Commands

if TYPE_CHECKING:
    from checkpoint.storage.storage import Storage
    from controller.archive import Archived, Summary

_HEADER = ("JOB", "STATE", "ENDED", "STEP", "ATTEMPTS", "INCIDENTS")
_Result = TypeVar("_Result")

Place = Annotated[
    str,
    typer.Argument(metavar="URL", help="retention.archive_url of the controller."),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = Commands(
        no_args_is_help=True,
        help="Ended jobs that the controller has archived and deleted (retention.archive_url).",
    )
    group.command("list")(list_jobs)
    group.command("show")(show_job)
    app.add_typer(group, name="archive")


def list_jobs(url: Place, json: Json = False) -> None:
    """List the jobs in an archive, those first that ended first."""
    from controller import archive

    found = _with_storage(url, archive.summaries)
    if json:
        output.print_json({"jobs": [asdict(each) for each in found]})
        return
    now_s = time.time()
    output.print_table(_HEADER, [_row(each, now_s) for each in found], empty="no archived jobs")


def show_job(
    url: Place,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Id of an archived job.")],
    json: Json = False,
) -> None:
    """Show an archived job and its incidents.

    With --json also its spec, the whole records of its incidents, and its loss curve.
    """
    from controller import archive

    try:
        found = _with_storage(url, lambda storage: archive.read(storage, job))
    except FileNotFoundError as error:
        raise CliError(
            f"no job {job} in the archive {url}; `outlast archive list {url}` lists them"
        ) from error
    if json:
        output.print_json(asdict(found))
    else:
        output.print_lines(_lines(found))


def _with_storage(url: str, work: Callable[[Storage], _Result]) -> _Result:
    from checkpoint.storage.storage import Storage
    from outlast.errors import OutlastError

    try:
        return work(Storage(url))
    except (OutlastError, ValueError) as error:
        raise CliError(str(error)) from error


def _row(each: Summary, now_s: float) -> tuple[str, ...]:
    ended = "" if each.finished_s is None else describe.short_clock(each.finished_s, now_s)
    return (
        each.job_id,
        each.state,
        ended,
        f"{each.step:,}",
        str(each.attempts),
        str(each.incidents),
    )


def _lines(found: Archived) -> list[tuple[str, str]]:
    summary = found.summary
    lines = [
        ("job", summary.job_id),
        ("state", f"{summary.state}: {summary.reason}"),
        ("submitted", describe.clock(summary.submitted_s)),
        ("ended", "" if summary.finished_s is None else describe.clock(summary.finished_s)),
        ("archived", describe.clock(summary.archived_s)),
        ("step", f"{summary.step:,} ({summary.attempts} attempts)"),
        ("loss curve", f"{len(found.steps):,} steps (--json)"),
    ]
    for incident in found.incidents:
        what = f"{incident['incident']}: {incident['cause']}"
        done = incident.get("action") or "reported"
        lines.append(("incidents", f"{what}, {done}; {incident.get('reason', '')}"))
    return lines
