"""`python -m tests.chaos`: faults at every moment, in real processes; see `tests/chaos`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.expected import Outcome, SeenIncident, expected, problems
from tests.chaos.matrix import Fault, Row, full, is_lasting, named, subset
from tests.chaos.record import Results
from tests.controller.processes import ROOT
from tests.few_cores import allow_huge_pages, share_cores

# Two cores run three rows, or two and training in which nothing goes wrong: each mostly waits.
AT_ONCE = 3
ROW_WITHIN_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A row, what it came to, and what is wrong with that."""

    row: Row
    outcome: Outcome | None
    problems: tuple[str, ...]


def main(arguments: list[str] | None = None) -> int:
    """Run the rows; 1 when one fails."""
    given = _parse(arguments)
    share_cores()
    allow_huge_pages(False)
    results = Results(given.output)
    rows = [row for row in _chosen(given) if not results.has_passed(row.name)]
    # Ten stops take as long as ten other rows: not what all wait for in the end.
    rows.sort(key=lambda row: row.fault is not Fault.PLANNED)
    begun_s = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="outlast-chaos-"))
    print(f"{len(rows)} of {len(full())} rows, seed {given.seed}; logs: {folder}", flush=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        trains = given.healthy_s and not results.has_been_healthy(given.healthy_s)
        is_beside = trains and not given.full
        healthy = pool.submit(_healthy, folder, given.healthy_s, results) if is_beside else None
        list(
            pool.map(partial(_undisturbed, folder), {_reference(row): row for row in rows}.values())
        )
        judged = list(pool.map(lambda row: _judged(folder, row, results), rows))
    failed = [each for each in judged if each.problems]
    false_positives = [] if healthy is None else healthy.result()
    if trains and not is_beside:
        # For so long, the load of rows beside it comes and goes: steps become slower in truth.
        false_positives = _healthy(folder, given.healthy_s, results)
    print(f"{len(judged) - len(failed)} of {len(judged)} rows pass, ", end="")
    print(f"{time.monotonic() - begun_s:.0f} s")
    for each in failed:
        print(f"  again: python -m tests.chaos --only {each.row.name}")
    return 1 if failed or false_positives else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--full", action="store_true", help="every row; takes hours")
    parser.add_argument(
        "--brief", action="store_true", help="every fault and every moment once, not every pair"
    )
    parser.add_argument("--seed", type=int, default=1, help="chooses the rows of the subset")
    parser.add_argument("--only", action="append", default=[], metavar="ROW")
    parser.add_argument(
        "--healthy-s",
        type=float,
        default=0.0,
        help="train undisturbed for so long, beside the rows; with --full, after them",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="keep the results as JSON; what has passed there is left out",
    )
    return parser.parse_args(arguments)


def _chosen(given: argparse.Namespace) -> tuple[Row, ...]:
    if given.only:
        return tuple(named(name, full()) for name in given.only)
    return full() if given.full else subset(given.seed, is_brief=given.brief)


def _reference(row: Row) -> str:
    """The folder of the same job when nothing happens to it."""
    return f"{row.layout}-long" if is_lasting(row) else row.layout


def _undisturbed(folder: Path, row: Row) -> None:
    is_long = ["--long"] if is_lasting(row) else []
    _run_process(folder / _reference(row), "--layout", row.layout, *is_long)


def _judged(folder: Path, row: Row, results: Results) -> Judged:
    own = folder / row.name.replace("/", "-").replace("@", "-")
    losses = folder / _reference(row) / "losses.json"
    try:
        _run_process(own, row.name, "--losses", str(losses))
        outcome = _read(own / "outcome.json")
    except (subprocess.SubprocessError, OSError) as error:
        judged = Judged(row=row, outcome=None, problems=(f"no outcome: {error}",))
    else:
        found = tuple(problems(expected(row), outcome))
        judged = Judged(row=row, outcome=outcome, problems=found)
    results.add(row.name, judged.problems, judged.outcome)
    print(_line(judged), flush=True)
    return judged


def _healthy(folder: Path, for_s: float, results: Results) -> list[str]:
    """What was taken for a fault in training that had none, and what was not noticed."""
    own = folder / "healthy"
    try:
        _run_process(own, "--for-s", str(for_s), module="healthy", within_s=for_s + ROW_WITHIN_S)
        seen: dict[str, Any] = json.loads((own / "healthy.json").read_text())
    except (subprocess.SubprocessError, OSError) as error:
        found = [f"no outcome: {error}"]
        seen = {}
    else:
        found = [*seen["incidents"]]
        if (seen["state"], seen["attempts"]) != ("RUNNING", 1):
            found.append(f"{seen['state']} in attempt {seen['attempts']}")
        # How long ranks waited for it is told with every checkpoint that is in storage.
        if seen["committed_step"] and not seen["checkpoint_s"]:
            found.append("its slow checkpoints are not in its account")
    verdict = "FAIL" if found else "pass"
    waited_s = seen.get("checkpoint_s", 0.0)
    words = "; ".join(found) or f"no incident, {waited_s:.1f} s waited for checkpoints"
    steps = seen.get("steps", 0)
    trained_s = seen.get("seconds", 0.0)
    results.add_healthy(trained_s, steps, found)
    print(
        f"{verdict}  healthy training, {trained_s:.0f} of {for_s:.0f} s, {steps} steps: {words}",
        flush=True,
    )
    return found


def _run_process(
    folder: Path, *arguments: str, module: str = "row", within_s: float = ROW_WITHIN_S
) -> None:
    folder.mkdir(parents=True)
    with (folder / "row.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", f"tests.chaos.{module}", str(folder), *arguments],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            timeout=within_s,
            check=True,
        )


def _read(path: Path) -> Outcome:
    document: dict[str, Any] = json.loads(path.read_text())
    incidents = tuple(
        SeenIncident(**{**each, "culprits": tuple(each["culprits"])})
        for each in document.pop("incidents")
    )
    trouble = tuple(document.pop("trouble"))
    return Outcome(incidents=incidents, trouble=trouble, **document)


def _line(judged: Judged) -> str:
    """A row of the table."""
    outcome = judged.outcome
    verdict = "FAIL" if judged.problems else "pass"
    if outcome is None:
        return f"{verdict}  {judged.row.name:44} {judged.problems[0]}"
    seen = "; ".join(_incident(each) for each in outcome.incidents) or "no incident"
    losses = "equal" if outcome.losses_equal else f"differ from {outcome.first_difference}"
    line = f"{verdict}  {judged.row.name:44} {outcome.state}, {outcome.attempts} attempt(s), "
    line += f"losses {losses}, {outcome.wall_s:.0f} s: {seen}"
    return "\n".join([line, *(f"      {problem}" for problem in judged.problems)])


def _incident(seen: SeenIncident) -> str:
    parts = [f"{seen.cause} -> {seen.action or 'nothing'}"]
    parts += [f"({', '.join(seen.culprits)})"] if seen.culprits else []
    parts += [f"found {seen.detection_s:.2f} s"] if seen.detection_s is not None else []
    parts += [f"back {seen.recovery_s:.2f} s"] if seen.recovery_s is not None else []
    parts += [f"{seen.steps_redone} redone"] if seen.steps_redone is not None else []
    return " ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
