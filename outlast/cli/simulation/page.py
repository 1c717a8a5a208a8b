"""A simulation as one self-contained web page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.sim.mixes import MIXES
from controller.sim.variants import small
from outlast.cli.pages import charts, shell
from outlast.cli.simulation.text import automatic, lines, replay_line
from outlast.durations import duration

if TYPE_CHECKING:
    from controller.sim.scenario import Result, Scenario
    from controller.sim.variants import Comparison


def render(result: Result, comparisons: tuple[Comparison, ...]) -> str:
    """The page of a result and what it was compared with."""
    scenario = result.scenario
    return shell.page(
        title=f"{scenario.nodes} nodes, {scenario.days:g} days, faults of {scenario.mix}",
        subtitle=f"simulated by the production machine, seed {scenario.seed}; every invariant "
        "checked on the way",
        outcome=_outcome(result),
        is_good=not result.violations,
        figures=[
            ("ETTR", f"{100 * result.ettr:.2f} %"),
            ("incidents", str(result.incidents)),
            ("without a person", f"{100 * automatic(result):.1f} %"),
            ("steps trained twice", str(result.steps_lost)),
            ("standbys", str(scenario.num_standbys)),
        ],
        body=[
            *_time(result),
            *_incidents(result),
            *_changes(scenario, comparisons),
            *_inputs(result),
        ],
    )


def _outcome(result: Result) -> str:
    if result.violations:
        return "; ".join(result.violations)
    return f"All invariants held, and the job trained for {100 * result.ettr:.2f} % of the time."


def _time(result: Result) -> list[str]:
    rows = [
        (part, f"{100 * seconds / result.wall_s:.2f} %", duration(seconds))
        for part, seconds in result.parts_s.items()
    ]
    return [
        shell.heading("What the time went into"),
        charts.parts_bar(result.parts_s),
        charts.parts_key(result.parts_s),
        shell.table(("Part", "Share", "Time"), rows, numbers=2),
        shell.heading("ETTR over the run, and over the last hour"),
        charts.ettr_curve(
            [(days, whole) for days, whole, _ in result.curve],
            [(days, hour) for days, _, hour in result.curve],
            unit="d",
        ),
    ]


def _incidents(result: Result) -> list[str]:
    classes = [
        (
            each.cause.replace("_", " "),
            str(each.count),
            duration(each.mean_recovery_s),
            duration(each.lost_s),
        )
        for each in result.classes
    ]
    struck = sorted(result.struck.items(), key=lambda item: -item[1])
    return [
        shell.heading("Incidents by cause"),
        shell.table(("Cause", "Incidents", "MTTR", "Lost"), classes, numbers=3),
        shell.heading("Faults that struck"),
        shell.table(("Fault", "Times"), [(name, str(count)) for name, count in struck], numbers=1),
    ]


def _changes(scenario: Scenario, comparisons: tuple[Comparison, ...]) -> list[str]:
    tried = small(scenario)
    titles = {
        "twice as long": "What ETTR would be if a phase took twice as long",
        "policy": "What another policy would give",
    }
    found: list[str] = []
    for kind, title in titles.items():
        changes = [(item.name, item.change) for item in comparisons if item.kind == kind]
        if changes:
            found += [shell.heading(title), charts.change_bars(changes)]
    if found:
        found.append(
            shell.paragraph(
                f"Each is a run of its own over {tried.days:g} of the {scenario.days:g} days, on "
                f"{tried.nodes} nodes whose job is struck as often as this one, compared with the "
                "unchanged scenario there."
            )
        )
    return found


def _inputs(result: Result) -> list[str]:
    rows = [
        (name, duration(each.expected_s), each.what, each.source)
        for name, each in result.scenario.all_durations().items()
    ]
    facts = [(name, text) for name, text in lines(result) if name in ("simulated", "standbys")]
    return [
        shell.heading("What was assumed"),
        shell.paragraph(MIXES[result.scenario.mix].source),
        shell.table(("Duration", "Mean", "Of what", "Source"), rows, numbers=1),
        shell.table(("", ""), facts),
        shell.paragraph(f"Replay: {replay_line(result.scenario)}"),
    ]
