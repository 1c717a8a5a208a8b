"""`outlast run`: a script of the user's own, in the place of torchrun."""

from __future__ import annotations

import os
import secrets
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import output
from outlast.cli.errors import CliError, ExitCode, bad_input
from outlast.cli.run.words import RunCommand, read_words

if TYPE_CHECKING:
    from outlast.cli.run.output import Output
    from outlast.torchrun.flags import RunOptions

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT", help="The script, or a module with -m, and then its arguments."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run", cls=RunCommand)(run)


def run(words: Words) -> None:
    """Run a script as torchrun does, and survive faults.

    Takes torchrun's options, also as variables (PET_NNODES). Without --server everything runs on
    this machine and is gone when the command ends. Those of torchrun's options that have no
    effect here are accepted, and a warning says why. Ctrl-C asks the script to stop, and once
    more kills it. Exits with the script's own exit code, or 128 + N where signal N ended it.
    """
    from outlast.cli.run import checks

    options = read_words(words)
    for line in options.warnings:
        output.print_message(f"warning: {line}")
    folder = checks.check_working_dir()
    checks.check_script(options, Path(folder))
    code = _under_a_server(options, folder) if options.server else _here(options, folder)
    if code:
        raise typer.Exit(code)


def _here(options: RunOptions, working_dir: str) -> int:
    """Run on this machine; the exit code."""
    from outlast.cli.embedded import EmbeddedController, StartCancelledError
    from outlast.cli.run import checks
    from outlast.cli.run.folders import RunFolders, checkpoint_root
    from outlast.cli.run.stops import Stops

    per_node = checks.workers_here(options.workers_per_node, os.environ)
    checkpoints = checkpoint_root(Path(working_dir))
    document = _document(options, working_dir, per_node, checkpoints)
    sink = _sink(options, per_node)
    stops = Stops()
    stops.install()
    folders = RunFolders(checkpoints)
    controller = EmbeddedController(
        folders.state, nodes=options.local_nodes, workers_per_node=per_node
    )
    is_kept, job_id = False, ""
    try:
        controller.start()
        # What takes time to import, while it starts.
        from outlast.cli.connect import connector, controller_of
        from outlast.cli.run.attend import Attendance
        from outlast.cli.run.written import written_bytes

        controller.wait_address(lambda: stops.is_asked)
        with controller_of("", controller.state_dir) as client:
            job = client.submit(document, wait_for_nodes=True)
        is_kept, job_id = True, job.job_id
        code = Attendance(
            connector("", controller.state_dir),
            job,
            sink,
            stops,
            is_local=True,
            least_nodes=options.min_nodes,
            check=controller.check,
            written=partial(written_bytes, folders.state / "nodes", job_id),
        ).to_end()
        is_kept = code != ExitCode.OK and not stops.is_asked
    except StartCancelledError:
        code, is_kept = stops.code, False
    finally:
        # The job has ended, or is not wanted any more: nothing is left to be done in order.
        controller.kill()
        folders.close(job_id, is_kept=is_kept)
    return code


def _under_a_server(options: RunOptions, working_dir: str) -> int:
    """Run on the nodes of a controller; the exit code."""
    from controller.addresses import parse_address
    from outlast.cli.connect import connector, controller_of
    from outlast.cli.folders import DEFAULT_STATE_DIR
    from outlast.cli.run import checks
    from outlast.cli.run.attend import Attendance
    from outlast.cli.run.stops import Stops

    with bad_input():
        parse_address(options.server, "--server")
    with controller_of(options.server, DEFAULT_STATE_DIR) as client:
        counted = options.workers_per_node
        nodes = () if isinstance(counted, int) else client.nodes()
        per_node = checks.workers_there(counted, nodes)
        sink = _sink(options, per_node)
        document = client.send_code(_document(options, working_dir, per_node))
        # Not before: until there is a job, Ctrl-C has nothing to stop but the command.
        stops = Stops()
        stops.install()
        job = client.submit(document, wait_for_nodes=True)
    output.print_message(f"outlast: submitted {job.job_id}")
    return Attendance(connector(options.server, DEFAULT_STATE_DIR), job, sink, stops).to_end()


def _document(
    options: RunOptions, working_dir: str, workers_per_node: int, checkpoints: Path | None = None
) -> dict[str, Any]:
    """The job's spec, checked.

    Raises:
        CliError: with every problem that it has.
    """
    from outlast.cli.specfile import describe_problems
    from outlast.problems import SpecError
    from outlast.spec.parse import parse_spec
    from outlast.torchrun.job import job_name, spec_of_run

    with bad_input():
        document = spec_of_run(
            options,
            name=job_name(options.script, secrets.token_hex(3)),
            working_dir=working_dir,
            workers_per_node=workers_per_node,
            checkpoint_url=None if checkpoints is None else str(checkpoints),
        )
    try:
        parse_spec(document)
    except SpecError as error:
        raise CliError(describe_problems("the command line", error)) from error
    return document


def _sink(options: RunOptions, workers_per_node: int) -> Output:
    from outlast.cli.run.output import Output, Wanted

    wanted = Wanted.by(options, workers_per_node)
    if not wanted.has_files:
        return Output(wanted, None)
    try:
        if options.log_dir is None:
            folder = Path(tempfile.mkdtemp(prefix="outlast-output-"))
        else:
            base = Path(options.log_dir).absolute()
            base.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f"{options.run_id or 'none'}_", dir=base))
    except OSError as error:
        raise CliError(f"--log-dir {options.log_dir}: {error.strerror}") from error
    output.print_message(f"outlast: output of ranks goes to {folder}")
    return Output(wanted, folder)
