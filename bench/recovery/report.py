"""Claims of the recovery benchmark, from its rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.results import Claim, write

Row = dict[str, Any]

_HOW = "python -m bench.recovery; paired, interleaved signals to rank 1 of 2"
_BASELINES = {
    "torchrun": (
        "kill_torchrun_vs_ours",
        ">= 10",
        "torchrun --max-restarts --monitor-interval 0.1, per-step checkpoint on tmpfs",
    ),
    "inprocess-fastest": (
        "kill_inprocess_vs_ours",
        ">= 2",
        "nvidia-resiliency-ext in-process restart, one spare, intervals of 0.1 s",
    ),
    "inprocess-default": (
        "kill_inprocess_default_vs_ours",
        ">= 2",
        "nvidia-resiliency-ext in-process restart, one spare, as shipped",
    ),
}
# A stopped rank is found by its silence: this long, however short its steps are.
_HANG_FLOOR_S = 2.0


def report(rows: Sequence[Row], cost: dict[str, float]) -> None:
    """Print the split of each kind, with its floors, and write the claims."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row["launcher"], row["signal"]), []).append(row)
    for (launcher, signal), found in kinds.items():
        print(f"{launcher}, {signal}: median {_median(found):.3f} s")
        for part in found[0]["split_s"]:
            value = statistics.median(row["split_s"][part] for row in found)
            print(f"  {part:<18} {value:.3f} s{_floor(found, part)}")
    ours, stopped = kinds["outlast", "SIGKILL"], kinds["outlast", "SIGSTOP"]
    claims = [
        _ratio(*_BASELINES[launcher], found, ours)
        for (launcher, _), found in kinds.items()
        if launcher in _BASELINES
    ]
    scripts = _script_claims(kinds, cost)
    write("recovery", list(rows), [*claims, *_own_claims(ours, stopped), *scripts])


def _floor(rows: Sequence[Row], part: str) -> str:
    """The least that the part can take, where that was measured."""
    floors = [row["floor_s"][part] for row in rows if part in row.get("floor_s", {})]
    return f", at least {statistics.median(floors):.3f} s" if floors else ""


def _median(rows: Sequence[Row]) -> float:
    return statistics.median(row["recovery_s"] for row in rows)


def _ratio(
    claim: str, goal: str, baseline: str, theirs: Sequence[Row], ours: Sequence[Row]
) -> Claim:
    pairs = zip(theirs, ours, strict=True)
    ratios = [their["recovery_s"] / our["recovery_s"] for their, our in pairs]
    return Claim(
        claim=claim,
        value=statistics.median(ratios),
        unit="x",
        goal=goal,
        baseline=f"{baseline}: median {_median(theirs):.3f} s",
        how=_HOW,
    )


def _own_claims(killed: Sequence[Row], stopped: Sequence[Row]) -> list[Claim]:
    hang_steps = [
        max(0.0, row["split_s"]["detect"] - _HANG_FLOOR_S) / row["step_s"] for row in stopped
    ]
    figures = (
        ("steps_lost_on_kill", max(row["steps_redone"] for row in killed), "steps", "<= 1"),
        (
            "hang_detection_steps",
            statistics.median(hang_steps),
            f"steps + {_HANG_FLOOR_S:g} s",
            "<= 3",
        ),
        ("steps_lost_on_hang", max(row["steps_redone"] for row in stopped), "steps", "<= 1"),
        ("recovery_median", _median(killed), "s", "reported"),
        ("hang_recovery_median", _median(stopped), "s", "reported"),
    )
    return [
        Claim(claim=claim, value=value, unit=unit, goal=goal, baseline="none", how=_HOW)
        for claim, value, unit, goal in figures
    ]


def _script_claims(kinds: dict[tuple[str, str], list[Row]], cost: dict[str, float]) -> list[Claim]:
    """torchrun's own script under Outlast, and what a session costs it."""
    killed, with_session = kinds["run", "SIGKILL"], kinds["session", "SIGKILL"]
    stopped = kinds["session", "SIGSTOP"]
    hang_steps = [max(0.0, row["detect_s"] - _HANG_FLOOR_S) / row["step_s"] for row in stopped]
    _, _, baseline = _BASELINES["torchrun"]
    theirs = kinds["torchrun", "SIGKILL"]
    figures = (
        (
            "session_steps_lost",
            max(row["steps_redone"] for row in (*with_session, *stopped)),
            "steps",
            "<= 1",
        ),
        (
            "session_hang_detection_steps",
            statistics.median(hang_steps),
            f"steps + {_HANG_FLOOR_S:g} s",
            "<= 3",
        ),
        ("session_step", cost["step_us"], "us", "<= 20"),
        ("session_save_vs_copy", cost["save_vs_copy"], "x", "<= 1.1"),
        ("session_save_vs_copy_one_thread", cost["save_vs_copy_one_thread"], "x", "reported"),
    )
    return [
        _ratio("kill_torchrun_vs_run", ">= 3", baseline, theirs, killed),
        _ratio("kill_torchrun_vs_session", ">= 8", baseline, theirs, with_session),
        *(
            Claim(claim=claim, value=value, unit=unit, goal=goal, baseline="none", how=_HOW)
            for claim, value, unit, goal in figures
        ),
    ]
