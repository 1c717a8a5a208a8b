"""A simulation's result for people, and the line that runs it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.sim.variants import small
from outlast.cli import output
from outlast.durations import duration

if TYPE_CHECKING:
    from controller.sim.scenario import Result, Scenario
    from controller.sim.variants import Comparison


def print_result(result: Result, comparisons: tuple[Comparison, ...]) -> None:
    """Everything that a terminal can show."""
    output.print_lines(lines(result))
    print()
    rows = [
        (
            each.cause.replace("_", " "),
            str(each.count),
            duration(each.mean_recovery_s),
            duration(each.lost_s),
        )
        for each in result.classes
    ]
    output.print_table(("CAUSE", "INCIDENTS", "MTTR", "LOST"), rows, empty="no incidents")
    if comparisons:
        print()
        print(compared_on(result.scenario))
    for kind in dict.fromkeys(item.kind for item in comparisons if item.kind != "base"):
        print()
        changes = [
            (f"{100 * item.change:+.2f}", f"{100 * item.ettr:.2f} %", item.name)
            for item in comparisons
            if item.kind == kind
        ]
        output.print_table(("CHANGE", "ETTR", kind.upper()), changes, empty="")


def lines(result: Result) -> list[tuple[str, str]]:
    """Labelled lines: what was simulated, and what came of it."""
    scenario = result.scenario
    outcome = [("violation", violation) for violation in result.violations]
    return [
        *outcome,
        (
            "simulated",
            f"{scenario.nodes} nodes x {scenario.gpus_per_node} GPUs, {scenario.days:g} days, "
            f"mix {scenario.mix}, seed {scenario.seed}",
        ),
        ("ETTR", f"{100 * result.ettr:.2f} %"),
        *(("", f"{part:<11} {_share(result, part)}") for part in result.parts_s),
        (
            "incidents",
            f"{result.incidents}, {result.by_person} of them waited for a person "
            f"({100 * automatic(result):.1f} % without)",
        ),
        ("steps", f"{result.steps} trained, {result.steps_lost} of them twice"),
        (
            "standbys",
            f"{scenario.num_standbys} warm spare(s); {result.replaced} faults took nodes, of which "
            f"{result.waited_for_node} waited for a new one; {result.nodes_brought} brought",
        ),
        ("invariants", "a violation" if result.violations else "all held"),
        ("replay", replay_line(scenario)),
    ]


def compared_on(scenario: Scenario) -> str:
    """Where other durations and policies were tried."""
    tried = small(scenario)
    return (
        f"Compared over {tried.days:g} of the {scenario.days:g} days, on {tried.nodes} nodes whose "
        "job is struck as often as this one:"
    )


def automatic(result: Result) -> float:
    """Share of the incidents that needed nobody."""
    return 1.0 - result.by_person / result.incidents if result.incidents else 1.0


def replay_line(scenario: Scenario) -> str:
    """The command that runs a scenario again, event by event."""
    words = [
        f"outlast simulate --nodes {scenario.nodes} --gpus {scenario.gpus_per_node}",
        f"--days {scenario.days:g} --mix {scenario.mix} --rate {scenario.rate:g}",
        f"--seed {scenario.seed} --step {scenario.step_s:g} --interval {scenario.interval_s:g}",
        f"--standbys {scenario.num_standbys} --heartbeat {scenario.heartbeat_s:g}",
        "--replicas" if scenario.replicas else "--no-replicas",
        *(["--elastic"] if scenario.elastic else []),
        f"--mass {scenario.mass}",
        *(f"--duration {name}={mean_s:g}" for name, mean_s in scenario.durations.items()),
    ]
    if scenario.only is not None:
        words.append(f"--only {','.join(map(str, scenario.only)) or 'none'}")
    return " ".join((*words, "--trace"))


def _share(result: Result, part: str) -> str:
    seconds = result.parts_s[part]
    return f"{100 * seconds / result.wall_s:6.2f} %  {duration(seconds)}"
