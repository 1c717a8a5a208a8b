"""Runs checks on this node: `python -m diagnostics.runner --suite preflight ...`.

Standard output carries one finding per line, as JSON, as they come; what the
checks themselves print goes to standard error. The exit code is 0 when the
suite ran, whatever the findings say, and 2 for wrong arguments.

An agent starts it with `--orders` instead: then standard input carries one order
per line (`diagnostics.core.orders`), and a line `{"done": true}` follows the
findings of each. It ends with its input. Importing torch takes seconds, and a
run of diagnostics has many orders for each node.

torch is imported once, here, and every check is a forked child with its own
deadline. So this process runs no tensor operation and never touches CUDA:
both would break the children.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from diagnostics import children
from diagnostics.checks.base import CheckFunction, Context
from diagnostics.checks.reporting import reporting
from diagnostics.core.baseline import Baseline
from diagnostics.core.finding import CheckVerdict, Finding, Measurement
from diagnostics.core.orders import DONE, Order, OrderKind
from diagnostics.core.plans import SUITES, Check, Suite
from diagnostics.core.verdicts import is_healthy, is_repeatable, judge, unmeasured

# A slow value may be chance; three in a row are not.
_MAX_TRIES = 3
# Below this no check can say anything.
_MIN_CHECK_S = 0.5


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parse(arguments)
    # Library threads would make forking unsafe; a check sets its own number.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    if not options.orders:
        order = Order(
            kind=OrderKind.SUITE,
            suite=options.suite,
            deadline_s=options.deadline_s,
            checkpoint_url=options.checkpoint_url,
        )
        _print(_run_suite(order, options))
        return 0
    # Not `for line in sys.stdin`, which reads ahead.
    for line in iter(sys.stdin.readline, ""):
        order = Order.from_json(line)
        if order.kind is OrderKind.SUITE:
            _print(_run_suite(order, options))
        else:
            from diagnostics.pairing import run_pair

            _print(run_pair(order, _context(order, options)))
        print(DONE, flush=True)
    return 0


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _context(order: Order, options: argparse.Namespace) -> Context:
    return Context(
        node=options.node,
        workers=options.workers,
        device=options.device,
        checkpoint_url=order.checkpoint_url,
        storage_probe=options.storage_probe,
        effort=SUITES[order.suite].effort,
        counters_file=options.baseline_file.with_name("counters.json"),
    )


def _run_suite(order: Order, options: argparse.Namespace) -> Iterator[str]:
    """Every finding of a suite on this node, as lines."""
    from diagnostics.checks import collectives, device, gpu, inventory, loopback, rdma, storage

    run = Run(
        context=_context(order, options),
        checks={
            "inventory": inventory.run,
            "gpu": gpu.run,
            "device": device.run,
            "loopback": loopback.run,
            "rdma": rdma.run,
            "collectives": collectives.run,
            "storage": storage.run,
        },
        baseline=_load_baseline(options.baseline_file),
        # Counted from here: importing torch may take a minute where many nodes share two cores.
        ends_at=time.monotonic() + order.deadline_s,
        is_disturbed=order.is_disturbed,
    )
    for finding in run.findings(SUITES[order.suite]):
        yield finding.to_json()
    _save_baseline(options.baseline_file, run.baseline)


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of a suite. `baseline` grows by the healthy values found."""

    context: Context
    # Checks of the suite that are not here do not apply to this run.
    checks: Mapping[str, CheckFunction]
    baseline: Baseline
    # By `time.monotonic()`.
    ends_at: float
    # A job trains on this node: nothing measured now is its norm.
    is_disturbed: bool = False
    _healthy: list[tuple[str, float]] = field(default_factory=list)

    def findings(self, suite: Suite) -> Iterator[Finding]:
        """Run the checks of `suite` one after another and yield what they find."""
        for check in suite.checks:
            if check.name in self.checks:
                yield from self._findings_of(check)
        # Only now: a value must not be judged by one of its own run.
        for key, value in () if self.is_disturbed else self._healthy:
            self.baseline = self.baseline.with_run(key, value)

    def _findings_of(self, check: Check) -> Iterator[Finding]:
        """Findings of one check, repeated while slow values may be chance."""
        doubted: dict[tuple[str, str, str], Finding] = {}
        for tries in range(1, _MAX_TRIES + 1):
            started_s = time.monotonic()
            for finding, measurement in self._try(check):
                # The history tells the devices of a node apart.
                history = measurement.baseline_key if measurement is not None else ""
                name = (finding.test, finding.metric, history)
                repeatable = is_repeatable(finding)
                certain_failure = finding.verdict is CheckVerdict.FAIL and not repeatable
                if tries > 1 and name not in doubted and not certain_failure:
                    continue  # The first try said it already.
                if repeatable and tries < _MAX_TRIES:
                    doubted[name] = finding
                    continue
                if doubted.pop(name, None) is not None:
                    finding = replace(finding, detail=f"{finding.detail}; try {tries}")
                if history and is_healthy(finding):
                    self._healthy.append((history, finding.value))
                yield finding
            spent_s = time.monotonic() - started_s
            if not doubted or self.ends_at - time.monotonic() < 2 * spent_s:
                break
        for finding in doubted.values():
            # Slow once is no proof, and nothing cleared it either.
            detail = f"{finding.detail}; it could not be repeated"
            yield replace(finding, verdict=CheckVerdict.INCONCLUSIVE, detail=detail)

    def _try(self, check: Check) -> Iterator[tuple[Finding, Measurement | None]]:
        started_s = time.monotonic()
        deadline_s = min(check.deadline_s, self.ends_at - started_s)
        if deadline_s < _MIN_CHECK_S:
            yield (
                self._unmeasured(check, CheckVerdict.INCONCLUSIVE, "no time was left for it"),
                None,
            )
            return
        try:
            for line in children.lines_of_child(self._body(check), deadline_s):
                yield self._finding_in(line, check, time.monotonic() - started_s)
        except (children.DeadlineError, children.ChildDiedError, ValueError) as error:
            # Past its deadline it may be a dead device and it may be a busy machine.
            late = isinstance(error, children.DeadlineError)
            verdict = CheckVerdict.INCONCLUSIVE if late else CheckVerdict.ERROR
            reason = f"{error}, so it was killed" if late else f"the check's process: {error}"
            yield self._unmeasured(check, verdict, reason, time.monotonic() - started_s), None

    def _body(self, check: Check) -> Callable[[int], None]:
        """What the child of `check` does with the descriptor it gets."""
        function = self.checks[check.name]
        return reporting(lambda emit: function(self.context, emit))

    def _finding_in(
        self, line: str, check: Check, spent_s: float
    ) -> tuple[Finding, Measurement | None]:
        ((kind, text),) = json.loads(line).items()
        if kind == "skip":
            return self._unmeasured(check, CheckVerdict.SKIP, text, spent_s), None
        if kind == "error":
            return self._unmeasured(check, CheckVerdict.ERROR, text, spent_s), None
        measurement = Measurement.from_json(text)
        finding = judge(
            measurement, self.baseline, self.context.node, is_disturbed=self.is_disturbed
        )
        return finding, measurement

    def _unmeasured(
        self, check: Check, verdict: CheckVerdict, reason: str, spent_s: float = 0.0
    ) -> Finding:
        return unmeasured(check.name, self.context.node, verdict, reason, duration_s=spent_s)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="diagnostics.runner", description="Check this node.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--suite", choices=sorted(SUITES))
    what.add_argument("--orders", action="store_true", help="orders come on standard input")
    parser.add_argument("--node", required=True, help="name that the findings carry")
    parser.add_argument("--workers", required=True, type=int, help="worker processes per node")
    parser.add_argument("--baseline-file", required=True, type=Path)
    parser.add_argument("--deadline-s", type=float, default=300.0, help="for the whole suite")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--checkpoint-url", default="", help="where checkpoints are written")
    parser.add_argument(
        "--storage-probe", default="", help="module that tries a checkpoint URL of any kind"
    )
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers is {options.workers}; it must be 1 or more")
    if not options.deadline_s > 0:
        parser.error(f"--deadline-s is {options.deadline_s}; it must be more than 0")
    return options


def _load_baseline(path: Path) -> Baseline:
    try:
        return Baseline.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Baseline()
    except (OSError, ValueError) as error:
        # A node without history is checked all the same, and starts a new one.
        print(f"baseline file {path} cannot be used: {error}; starting anew", file=sys.stderr)
        return Baseline()


def _save_baseline(path: Path, baseline: Baseline) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(baseline.to_json(), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        print(f"baseline file {path} cannot be written: {error}", file=sys.stderr)
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    # Checks for an agent that was killed would load a node for nobody.
    children.die_with(os.getppid())
    sys.exit(main())
