"""The report as one self-contained web page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from demo import svg
from demo.analysis import Phase
from outlast.cli.pages.shell import style, template
from outlast.durations import duration

_KIND_NAMES = {"worker_killed": "worker killed", "node_lost": "node lost"}


def render(report: Mapping[str, Any]) -> str:
    """The page for a report; everything that came from outside is escaped."""
    curve = report["curve"]
    marks = [(fault["step"], kind_name(fault)) for fault in report["faults"]]
    return template("report.html").substitute(
        style=style(),
        title=escape(f"{report['job']['name']}: what two faults cost"),
        subtitle=escape(
            f"seed {report['seed']} · {report['steps']} steps · {report['job']['layout']} · "
            f"{report['date']}"
        ),
        outcome_class="good" if report["passed"] else "bad",
        outcome=escape(report["outcome"]),
        figures="".join(_figure(name, value) for name, value in headline_figures(report)),
        loss_curve=svg.loss_curve(
            curve["losses"], curve["fault_free_losses"], report["eval_losses"], marks
        ),
        fault_rows="\n".join(_fault_row(fault) for fault in report["faults"]),
        timelines="\n".join(_timeline(fault) for fault in report["faults"]),
        ettr_formula=escape(report["ettr_formula"]),
        facts="\n".join(_fact(name, value) for name, value in _facts(report)),
    )


def headline_figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The few numbers that matter most: (name, value)."""
    final = report["final_loss"]
    return [
        ("ETTR", f"{100 * report['ettr']:.1f} %"),
        ("with faults", duration(report["wall_s"])),
        ("without faults", duration(report["fault_free"]["wall_s"])),
        ("final loss", "none" if final is None else f"{final:.4f}"),
    ]


def kind_name(fault: Mapping[str, Any]) -> str:
    """A fault's kind in words."""
    kind = str(fault["kind"])
    return _KIND_NAMES.get(kind, kind)


def seconds(value: float | None) -> str:
    """A measured time, to the hundredth where that means something."""
    if value is None:
        return "never"
    return f"{value:.2f} s" if value < 60 else duration(value)


def _figure(name: str, value: str) -> str:
    return f"<div><b>{escape(value)}</b>{escape(name)}</div>"


def _fault_row(fault: Mapping[str, Any]) -> str:
    redone = "none" if fault["steps_redone"] is None else str(fault["steps_redone"])
    cells = [
        f"<td><b>{escape(kind_name(fault))}</b><br>{escape(fault['victim'])}</td>",
        f'<td class="number">{fault["step"]}</td>',
        f'<td class="number">{seconds(fault["detection_s"])}</td>',
        f'<td class="number">{seconds(fault["recovery_s"])}</td>',
        f'<td class="number">{redone}</td>',
        f"<td>{escape(fault['diagnosis'] or 'not detected')}</td>",
        f"<td>{escape(_verdict(fault))}</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _verdict(fault: Mapping[str, Any]) -> str:
    if fault["incident_id"] is None:
        return "no incident was opened"
    action = str(fault["action"]).replace("_", " ")
    cause = str(fault["cause"]).replace("_", " ")
    return f"{cause} → {action}: {fault['verdict']}"


def _timeline(fault: Mapping[str, Any]) -> str:
    if not fault["timeline"]:
        return ""
    phases = [
        Phase(
            name=entry["phase"],
            start_s=entry["start_s"],
            duration_s=entry["duration_s"],
            detail=entry["detail"],
        )
        for entry in fault["timeline"]
    ]
    rows = "\n".join(
        f'<tr><td class="number">{phase.start_s:+.3f} s</td><td>{escape(phase.name)}</td>'
        f'<td class="number">{phase.duration_s:.3f} s</td><td>{escape(phase.detail)}</td></tr>'
        for phase in phases
    )
    heading = f"{fault['incident_id']}: {kind_name(fault)}"
    return (
        f"<h3>{escape(heading)}</h3>\n{svg.timeline(phases, end_s=fault['recovery_s'])}\n"
        '<div class="scroll"><table><thead><tr><th>After the fault</th><th>Phase</th>'
        f"<th>Took</th><th></th></tr></thead><tbody>\n{rows}\n</tbody></table></div>"
    )


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    difference = report["first_difference"]
    return [
        ("losses identical", "yes" if report["loss_identical"] else f"no: {difference}"),
        ("SHA-256 of the losses", report["losses_sha256"]),
        ("… of the fault-free run", report["fault_free"]["losses_sha256"]),
        ("productive step time", duration(report["productive_s"])),
        *(("versions", f"{name} {version}") for name, version in report["versions"].items()),
        *((name, str(value)) for name, value in report["machine"].items()),
    ]


def _fact(name: str, value: str) -> str:
    return f"<tr><th>{escape(name)}</th><td><code>{escape(value)}</code></td></tr>"
