"""The `outlast demo` command."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli.errors import CliError, ExitCode
from outlast.cli.options import Assignments
from outlast.startup import check_packages, stop_signals

if TYPE_CHECKING:
    from demo.faults import PlannedFault
    from demo.scenario import Recorded
    from outlast.spec import JobSpec

_SHARED_MEMORY = Path("/dev/shm")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Draws when and whom the faults hit.")
    ] = 1,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the report and all state go.")
    ] = Path("runs/demo"),
    spec: Annotated[
        Path | None,
        typer.Option("--spec", metavar="SPEC", help="The job; the example gpt-tiny by default."),
    ] = None,
    set_: Assignments = [],  # noqa: B006
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep checkpoints and state, not only the report.")
    ] = False,
) -> None:
    """Break a job twice and prove that its losses are the same.

    Starts a controller with local nodes, kills a random worker and later a
    whole node, waits for the job to finish, runs it again undisturbed and compares
    the losses of every step bit for bit. Writes report.json and report.html.
    Exits 0 only if the job succeeded, both faults were noticed and the losses
    are identical. Ctrl-C stops everything.
    """
    # One's own `demo.py` is a likely name, and only this command minds.
    check_packages(("demo",))
    from demo import summary
    from demo.faults import plan_faults
    from outlast.cli.places import Nodes
    from outlast.cli.specfile import EXAMPLE, load_spec

    read = load_spec(spec or EXAMPLE, set_, Nodes.HERE)
    checked, document = read.spec, read.document
    _check_memory(checked)
    out = out.resolve()
    planned = plan_faults(seed, checked.steps)
    _stop_on_signals()
    print(f"run 1 of 2: {checked.name} with two faults (seed {seed})", flush=True)
    broken = _run(out / "faulted", checked, document, planned, keep=keep)
    print("run 2 of 2: the same job, undisturbed", flush=True)
    whole = _run(out / "fault-free", checked, document, (), keep=keep)
    report = summary.build(checked, seed, broken, whole)
    summary.print_summary(report, summary.save(report, out))
    if not report["passed"]:
        raise typer.Exit(ExitCode.JOB_FAILED)


def _run(
    state_dir: Path,
    spec: JobSpec,
    document: dict[str, Any],
    planned: tuple[PlannedFault, ...],
    *,
    keep: bool,
) -> Recorded:
    from demo import scenario
    from demo.host import Host

    host = Host(
        state_dir,
        nodes=spec.num_nodes,
        workers_per_node=spec.workers_per_node,
        standby=max(1, spec.resources.standby),
    )
    try:
        recorded = scenario.run(host, spec, document, planned)
    finally:
        host.stop()
    # A run that failed is kept: somebody will want to know why.
    if recorded.succeeded and not keep:
        shutil.rmtree(state_dir, ignore_errors=True)
    return recorded


def _check_memory(spec: JobSpec) -> None:
    """Refuse to start where host memory cannot hold the checkpoints of all local nodes."""
    from checkpoint.sizing import host_memory_bytes
    from outlast.cli.describe import size

    needed = host_memory_bytes(spec, range(spec.layout.world_size))
    try:
        free = shutil.disk_usage(_SHARED_MEMORY).free
    except OSError as error:
        raise CliError(
            f"the demo keeps checkpoints in {_SHARED_MEMORY}: {error.strerror}"
        ) from error
    if free < needed:
        raise CliError(
            f"{_SHARED_MEMORY} has {size(free)} free and the demo needs {size(needed)} for "
            f"host-memory checkpoints; free some, enlarge it (docker: --shm-size), or train a "
            "smaller model with --set model.hidden=32"
        )


def _stop_on_signals() -> None:
    """Let a closed terminal or a polite kill stop everything, as Ctrl-C does."""
    numbers = stop_signals()

    def interrupt(number: int, frame: object) -> None:
        # Once is enough: a second signal must not break off the cleaning up.
        for again in numbers:
            signal.signal(again, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in numbers:
        signal.signal(each, interrupt)
    # gRPC's extension module drops an interrupt that comes while it is imported, and
    # there is no second one: the signals wait until it is there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        import outlast.client  # noqa: F401
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
