"""`outlast diagnose`: checks of nodes and of the links between them, now or in the past."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from outlast.cli import completion, describe, findings, output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import Controller, Json, StateDir

if TYPE_CHECKING:
    from outlast.client import Client
    from outlast.v1.diagnostics_pb2 import DiagnosticRun, Finding, WatchDiagnosticsResponse

Nodes = Annotated[
    list[str], typer.Argument(metavar="[NODE]...", help="Every connected node unless given.")
]
MoreNodes = Annotated[
    str, typer.Option("--nodes", metavar="A,B", help="The same, separated by commas.")
]
NodesOfJob = Annotated[
    str,
    typer.Option(
        "--job", metavar="JOB", help="The nodes of a job.", autocompletion=completion.jobs
    ),
]
Suite = Annotated[str, typer.Option("--suite", metavar="SUITE", help="preflight or on-failure.")]
Every = Annotated[bool, typer.Option("--every", help="Print every finding, good ones too.")]
ListRuns = Annotated[
    bool, typer.Option("--list", help="List the runs that are kept, newest first.")
]
Show = Annotated[
    str, typer.Option("--show", metavar="RUN", help="Print the report of a run that is kept.")
]
_RUN_HEADER = ("RUN", "STARTED", "STATE", "SUITE", "ORIGIN", "NODES", "FOUND")


class _Screen(Protocol):
    """Where progress is shown."""

    def phase(self, text: str) -> None: ...

    def line(self, text: str) -> None: ...


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(diagnose)


def diagnose(
    nodes: Nodes = [],  # noqa: B006
    more_nodes: MoreNodes = "",
    job: NodesOfJob = "",
    suite: Suite = "preflight",
    every: Every = False,
    list_runs: ListRuns = False,
    show: Show = "",
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Check nodes and the links between them, and print one report.

    Each node runs the suite, then nodes exchange data in pairs, so that a bad node and
    a bad link are told apart. A node that is training is checked beside its workers:
    slow values there prove nothing. Exits 1 when something failed.
    """
    wanted = [*nodes, *(name for name in more_nodes.split(",") if name)]
    _refuse_conflicts(", ".join(wanted), job, list_runs=list_runs, show=show)
    with controller_of(controller, state_dir) as client:
        if list_runs:
            _print_runs(list(client.diagnostic_runs()), json)
            return
        if show:
            run = client.diagnostic_run(show)
        else:
            job_id = find_job(client, job).job_id if job else ""
            run = _run(client, wanted, job_id, suite, quiet=json)
    if json:
        output.print_json({"run": output.facts(run)})
    else:
        findings.print_report(run, every=every)
    if findings.has_failed(run):
        raise typer.Exit(ExitCode.JOB_FAILED)


def _refuse_conflicts(nodes: str, job: str, *, list_runs: bool, show: str) -> None:
    """What is asked for must be one thing: it would be bad to check fewer nodes than meant."""
    if nodes and job:
        raise CliError("name either nodes or a job, not both")
    if list_runs and show:
        raise CliError(f"--list prints all runs and --show {show} one of them: give only one")
    past = "--list" if list_runs else f"--show {show}" if show else ""
    new = nodes or (f"--job {job}" if job else "")
    if past and new:
        raise CliError(
            f"{past} prints what earlier runs found, and {new} would be checked in a new one: "
            "give only one"
        )


def _run(
    client: Client, nodes: list[str], job_id: str, suite: str, *, quiet: bool
) -> DiagnosticRun:
    """Begin a run and show it until it has ended; the whole of it."""
    started = client.diagnose(nodes, job_id=job_id, suite=suite)
    with _screen(quiet) as screen:
        screen.line(f"run {started.run_id}: {suite} on {', '.join(started.nodes)}")
        for warning in started.warnings:
            screen.line(f"warning: {warning}")
        for update, new in _progress(client, started.run_id):
            for finding in new:
                if finding.verdict not in ("pass", "skip"):
                    screen.line(findings.line(finding))
            pending = f": {', '.join(update.pending_nodes)}" if update.pending_nodes else ""
            screen.phase(f"{update.phase}{pending}")
    return client.diagnostic_run(started.run_id)


def _progress(
    client: Client, run_id: str
) -> Iterator[tuple[WatchDiagnosticsResponse, Sequence[Finding]]]:
    """What a run says, each with the findings that are new; over the end of a renewed login."""
    from outlast.client_errors import LoginOverError

    num_told = 0
    while True:
        # A stream begins with all that was found so far.
        num_seen = 0
        try:
            for update in client.watch_diagnostics(run_id):
                num_seen += len(update.findings)
                num_new = max(0, num_seen - num_told)
                num_told = max(num_told, num_seen)
                yield update, update.findings[len(update.findings) - num_new :]
        except LoginOverError:
            continue
        return


@contextmanager
def _screen(quiet: bool) -> Iterator[_Screen]:
    """Progress on the terminal; as lines where there is none; nowhere when quiet."""
    if quiet:
        yield _Silent()
    elif not sys.stdout.isatty():
        yield _Lines()
    else:
        from rich.console import Console

        console = Console(highlight=False)
        with console.status("starting") as status:
            yield _Live(lambda text: console.print(text, markup=False), status.update)


class _Silent:
    def phase(self, text: str) -> None:
        pass

    def line(self, text: str) -> None:
        pass


class _Lines:
    """Each phase once, with the time."""

    def __init__(self) -> None:
        self._last = ""

    def phase(self, text: str) -> None:
        # Nodes leave the list one by one; only what is done is news here.
        name = text.partition(": ")[0]
        if name and name != self._last:
            self.line(text)
        self._last = name

    def line(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


class _Live:
    """A status line that changes, below the lines that stay."""

    def __init__(self, line: Callable[[str], None], phase: Callable[[str], None]) -> None:
        self._line, self._phase = line, phase

    def phase(self, text: str) -> None:
        if text:
            self._phase(text)

    def line(self, text: str) -> None:
        self._line(text)


def _print_runs(runs: list[DiagnosticRun], json: bool) -> None:
    if json:
        output.print_json({"runs": [output.facts(run) for run in runs]})
        return
    rows = [
        (
            run.run_id,
            describe.clock(run.started_s),
            run.state,
            run.suite,
            run.origin,
            str(len(run.nodes)),
            findings.summary(run),
        )
        for run in runs
    ]
    output.print_table(_RUN_HEADER, rows, empty="no runs of diagnostics are kept")
