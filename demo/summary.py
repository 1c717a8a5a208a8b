"""The report of a demo: its figures, the files, and the lines printed at the end."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo import analysis
from demo.page import kind_name, render, seconds
from outlast import __version__
from outlast.cli import output
from outlast.cli.describe import size
from outlast.durations import duration

if TYPE_CHECKING:
    from demo.scenario import Recorded
    from outlast.spec import JobSpec

_LIBRARIES = ("torch", "numpy", "grpcio", "protobuf")


def build(spec: JobSpec, seed: int, broken: Recorded, whole: Recorded) -> dict[str, Any]:
    """Everything that report.json says."""
    difference = analysis.first_difference(broken.reports, whole.curve, steps=spec.steps)
    matched = analysis.match_incidents(broken.faults, broken.incidents)
    faults = [
        analysis.describe_fault(fault, incident)
        for fault, incident in zip(broken.faults, matched, strict=True)
    ]
    curve, layout = broken.curve, spec.layout
    report: dict[str, Any] = {
        "loss_identical": difference is None,
        "first_difference": difference,
        "faults": faults,
        "ettr": analysis.ettr(curve, broken.finished_s),
        "ettr_formula": analysis.ETTR_FORMULA,
        "productive_s": analysis.productive_s(curve),
        "wall_s": analysis.wall_s(curve, broken.finished_s) if curve else 0.0,
        "steps": spec.steps,
        "losses_sha256": analysis.losses_sha256(curve),
        "final_loss": curve[-1].loss if curve else None,
        "eval_losses": [[s.step, s.eval_loss] for s in curve if s.eval_loss is not None],
        "fault_free": {
            "job_id": whole.job["job_id"],
            "state": whole.job["state"],
            "wall_s": analysis.wall_s(whole.curve, whole.finished_s) if whole.curve else 0.0,
            "ettr": analysis.ettr(whole.curve, whole.finished_s),
            "losses_sha256": analysis.losses_sha256(whole.curve),
        },
        "job": {
            "job_id": broken.job["job_id"],
            "name": spec.name,
            "state": broken.job["state"],
            "restarts": broken.job["restarts"],
            "layout": f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp}",
        },
        "seed": seed,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "versions": versions(),
        "machine": machine(),
        "curve": {
            "losses": [[step.step, step.loss] for step in curve],
            "fault_free_losses": [[step.step, step.loss] for step in whole.curve],
        },
        "incidents": list(broken.incidents),
    }
    failures = _failures(report, len(faults))
    return report | {"passed": not failures, "outcome": _outcome(report, failures)}


def save(report: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write report.json and report.html; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_page = folder / "report.json", folder / "report.html"
    as_json.write_text(json.dumps(report, indent=2) + "\n")
    as_page.write_text(render(report), encoding="utf-8")
    return as_json, as_page


def print_summary(report: Mapping[str, Any], paths: tuple[Path, Path]) -> None:
    """The report in a few lines."""
    print()
    print(report["outcome"])
    output.print_table(
        ("FAULT", "STEP", "DETECTED", "RECOVERED", "STEPS REDONE", "CAUSE", "ACTION", "VICTIM"),
        [
            (
                kind_name(fault),
                str(fault["step"]),
                seconds(fault["detection_s"]),
                seconds(fault["recovery_s"]),
                "-" if fault["steps_redone"] is None else str(fault["steps_redone"]),
                str(fault["cause"]).replace("_", " "),
                str(fault["action"]).replace("_", " "),
                fault["victim"],
            )
            for fault in report["faults"]
        ],
        empty="no fault was injected",
    )
    whole = report["fault_free"]
    output.print_lines(
        [
            ("ettr", f"{100 * report['ettr']:.1f} % ({100 * whole['ettr']:.1f} % without faults)"),
            (
                "time",
                f"{duration(report['wall_s'])} with faults, {duration(whole['wall_s'])} without",
            ),
            ("report", str(paths[1])),
            ("", str(paths[0])),
        ]
    )


def versions() -> dict[str, str]:
    """Versions of ourselves, Python and the libraries that decide the bits."""
    found = {"outlast": __version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """What this ran on."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": size(memory_bytes),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _failures(report: Mapping[str, Any], num_faults: int) -> list[str]:
    failures = []
    for run, job in (("the run with faults", report["job"]), ("the other", report["fault_free"])):
        if job["state"] != "SUCCEEDED":
            failures.append(f"{run} ended {job['state']}")
    if num_faults < 2:
        failures.append(f"only {num_faults} of 2 faults could be injected before the job ended")
    failures += [
        f"nobody noticed that {fault['victim']} was hit"
        for fault in report["faults"]
        if fault["incident_id"] is None
    ]
    if not report["loss_identical"]:
        difference = report["first_difference"]
        failures.append(f"the losses differ from step {difference['step']} on: {difference['why']}")
    return failures


def _outcome(report: Mapping[str, Any], failures: list[str]) -> str:
    if failures:
        return "FAILED: " + "; ".join(failures)
    return (
        f"Identical: all {report['steps']} losses have the same bits with "
        f"{len(report['faults'])} faults and without."
    )
