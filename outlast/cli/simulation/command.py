"""`outlast simulate`: what a large job would live through, decided by the production machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import output
from outlast.cli.errors import ExitCode, bad_input
from outlast.cli.options import Json

if TYPE_CHECKING:
    from controller.sim.scenario import Result, Scenario
    from controller.sim.variants import Comparison


Nodes = Annotated[int, typer.Option("--nodes", metavar="N", help="Nodes of the job.")]
Gpus = Annotated[int, typer.Option("--gpus", metavar="N", help="GPUs of a node.")]
Days = Annotated[float, typer.Option("--days", metavar="DAYS", help="Virtual days.")]
MixName = Annotated[
    str,
    typer.Option("--mix", metavar="NAME", help="Published faults: llama3, byterobust or ft-hsdp."),
]
Rate = Annotated[float, typer.Option("--rate", metavar="TIMES", help="Times the mix's own rate.")]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="Everything random follows from it.")
]
Step = Annotated[float, typer.Option("--step", metavar="S", help="Length of a step.")]
Interval = Annotated[
    float, typer.Option("--interval", metavar="S", help="Between checkpoints in storage.")
]
Standbys = Annotated[
    int | None,
    typer.Option(
        "--standbys", metavar="N", help="Warm spare nodes; by default computed from the rate."
    ),
]
Heartbeat = Annotated[float, typer.Option("--heartbeat", metavar="S", help="Period of heartbeats.")]
Replicas = Annotated[
    bool, typer.Option(help="Keep a copy of each node's host memory on another node.")
]
Elastic = Annotated[
    bool,
    typer.Option(
        help="Go on with 7/8, 3/4 or half of the nodes while some are missing, "
        "as jobs with recovery.elastic do."
    ),
]
Mass = Annotated[
    int,
    typer.Option(
        "--mass",
        metavar="N",
        help="So many racks lose power, the controller is cut off so often, and dies so often.",
    ),
]
Durations = Annotated[
    list[str],
    typer.Option(
        "--duration",
        metavar="NAME=S",
        help="Another mean for a duration, such as nccl=20; may be repeated.",
    ),
]
WhatIf = Annotated[bool, typer.Option(help="Compare with other durations and other policies.")]
Only = Annotated[str, typer.Option("--only", metavar="N,N", help="Strike with these faults only.")]
Trace = Annotated[bool, typer.Option("--trace", help="Print one line per event.")]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page with pictures.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(simulate)


def simulate(
    nodes: Nodes = 1536,
    gpus: Gpus = 8,
    days: Days = 54.0,
    mix: MixName = "llama3",
    rate: Rate = 1.0,
    seed: Seed = 0,
    step: Step = 6.0,
    interval: Interval = 600.0,
    standbys: Standbys = None,
    heartbeat: Heartbeat = 2.0,
    replicas: Replicas = True,
    elastic: Elastic = False,
    mass: Mass = 1,
    duration: Durations = [],  # noqa: B006
    what_if: WhatIf = True,
    only: Only = "",
    trace: Trace = False,
    html: Html = None,
    json: Json = False,
) -> None:
    """Simulate a large job under published faults, and say what they would cost.

    The machine, its policy and its journal are those of the controller; nodes, network,
    cluster and time are simulated. Every invariant is checked on the way. What each phase of
    a recovery takes is drawn from published or measured durations, which are listed with
    their sources. Exit code 1 says that an invariant does not hold.
    """
    from controller.sim.scenario import Scenario

    with bad_input():
        scenario = Scenario(
            nodes=nodes,
            gpus_per_node=gpus,
            days=days,
            mix=mix,
            rate=rate,
            seed=seed,
            step_s=step,
            interval_s=interval,
            standbys=standbys,
            heartbeat_s=heartbeat,
            replicas=replicas,
            elastic=elastic,
            mass=mass,
            durations=_durations(duration),
            only=_numbers(only),
        )
    _simulate(scenario, what_if=what_if, trace=trace, html=html, json=json)


def _simulate(
    scenario: Scenario, *, what_if: bool, trace: bool, html: Path | None, json: bool
) -> None:
    """Run the scenario and say how it went, in each form that was asked for."""
    from controller.sim.scenario import simulate as run
    from controller.sim.variants import compare
    from outlast.cli.progress import simulation_bar
    from outlast.cli.simulation import page, text

    days = scenario.days
    with simulation_bar(days, quiet=json or trace) as report:
        result = run(scenario, trace=trace, report=lambda done, how: report(how, done, days))
        if result.violations and not trace:
            report("a violation; looking for the faults that it takes", days, days)
            result = _shrunk(result)
        comparisons = (
            () if not what_if or result.violations or trace else compare(scenario, report=report)
        )
    if html is not None:
        html.write_text(page.render(result, comparisons), encoding="utf-8")
    if json:
        output.print_json(facts(result, comparisons))
    elif not trace:
        text.print_result(result, comparisons)
    if result.violations:
        raise typer.Exit(ExitCode.JOB_FAILED)


def facts(result: Result, comparisons: tuple[Comparison, ...]) -> dict[str, Any]:
    """A result as plain values, with the durations' sources."""
    from controller.sim.mixes import MIXES
    from controller.sim.variants import small
    from outlast.cli.simulation.text import replay_line

    found = asdict(result)
    found["scenario"]["standbys"] = result.scenario.num_standbys
    found["violations"] = list(result.violations)
    found["comparisons"] = [asdict(item) for item in comparisons]
    tried = small(result.scenario)
    found["compared_on"] = {"nodes": tried.nodes, "days": tried.days} if comparisons else None
    found["mix_source"] = MIXES[result.scenario.mix].source
    found["durations"] = {
        name: asdict(each) for name, each in result.scenario.all_durations().items()
    }
    found["replay"] = replay_line(result.scenario)
    return found


def _shrunk(result: Result) -> Result:
    """The same violation with as few of the faults as possible."""
    from dataclasses import replace

    from controller.sim.scenario import simulate as run
    from controller.sim.shrink import shrink
    from controller.sim.violation import kind_of

    def kinds_of(violations: tuple[str, ...]) -> set[str]:
        return {kind_of(each) for each in violations}

    def again(only: tuple[int, ...]) -> Result:
        return run(replace(result.scenario, only=only))

    wanted = kinds_of(result.violations)
    planned = result.scenario.only or tuple(range(result.num_planned))
    return again(shrink(planned, lambda only: kinds_of(again(only).violations) == wanted))


def _durations(assignments: list[str]) -> dict[str, float]:
    """`name=seconds` of the command line.

    Raises:
        ValueError: one is not of that form.
    """
    found: dict[str, float] = {}
    for assignment in assignments:
        name, is_there, value = assignment.partition("=")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise ValueError(
                f"--duration {assignment}: expected NAME=SECONDS, such as nccl=20"
            ) from error
        if not is_there:
            raise ValueError(f"--duration {assignment}: expected NAME=SECONDS, such as nccl=20")
    return found


def _numbers(only: str) -> tuple[int, ...] | None:
    """Numbers of faults, `none` for no fault at all; None when all are wanted."""
    if not only:
        return None
    try:
        return () if only == "none" else tuple(int(number) for number in only.split(","))
    except ValueError as error:
        raise ValueError(f"--only {only}: expected numbers of faults, such as 3,17") from error
