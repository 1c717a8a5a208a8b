"""A run of the production runner over scripted checks: `python -m tests.diagnostics.scripted`.

The runner forks, so it gets a process of its own, as it has in production.
Arguments: a folder for what the checks leave behind, the deadline of the run,
the deadline of each check, and the names of checks below.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from diagnostics import children
from diagnostics.checks import rdma
from diagnostics.checks.base import CheckFunction, Context, Emit, SkipCheckError
from diagnostics.core.baseline import Baseline
from diagnostics.core.plans import PREFLIGHT, Check
from diagnostics.runner import Run
from tests.diagnostics.build import KEY, measurement

FOLDER = Path(sys.argv[1])


def good(context: Context, emit: Emit) -> None:
    emit(measurement(100.0))


def prints(context: Context, emit: Emit) -> None:
    print("this must not reach the findings")
    os.write(1, b"nor this\n")
    emit(measurement(100.0))


def hangs(context: Context, emit: Emit) -> None:
    """Emits, then hangs together with a child of its own, and notes both pids."""
    emit(measurement(100.0))
    grandchild = children.fork(signal.pause)
    (FOLDER / "pids.tmp").write_text(f"{os.getpid()} {grandchild}")
    (FOLDER / "pids.tmp").rename(FOLDER / "pids")
    signal.pause()


def crashes(context: Context, emit: Emit) -> None:
    emit(measurement(100.0))
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(context: Context, emit: Emit) -> None:
    raise OSError("the driver is gone")


def skips(context: Context, emit: Emit) -> None:
    raise SkipCheckError("there is no such device")


def flips(context: Context, emit: Emit) -> None:
    _count_try()
    emit(measurement(1.0, metric="differing_elements", at_most=0.0, baseline_key=""))


def slow(context: Context, emit: Emit) -> None:
    _count_try()
    emit(measurement(50.0, test="memory", baseline_key="memory"))
    emit(measurement(10.0))


def slow_once(context: Context, emit: Emit) -> None:
    emit(measurement(50.0, test="memory", baseline_key="memory"))
    emit(measurement(10.0 if _count_try() == 1 else 95.0))


def slow_and_long(context: Context, emit: Emit) -> None:
    _count_try()
    emit(measurement(10.0))
    # Longer than half of the run's deadline: there is no time for a repeat.
    signal.sigtimedwait([], float(sys.argv[2]) * 0.6)


def rdma_to_itself(context: Context, emit: Emit) -> None:
    """The real check, with devices and perftest from the folder."""
    rdma._DEVICES = FOLDER / "devices"
    os.environ["PATH"] = f"{FOLDER}:{os.environ['PATH']}"
    rdma.run(context, emit)


def _count_try() -> int:
    count = FOLDER / "tries"
    tries = int(count.read_text()) + 1 if count.exists() else 1
    count.write_text(str(tries))
    return tries


CHECKS: dict[str, CheckFunction] = {
    function.__name__: function
    for function in (
        good,
        prints,
        hangs,
        crashes,
        raises,
        skips,
        flips,
        slow,
        slow_once,
        slow_and_long,
        rdma_to_itself,
    )
}


def main() -> None:
    deadline_s, check_deadline_s = float(sys.argv[2]), float(sys.argv[3])
    run = Run(
        context=Context(
            node="node-0",
            workers=2,
            device="cpu",
            checkpoint_url="",
            storage_probe="",
            effort=PREFLIGHT.effort,
            counters_file=FOLDER / "counters.json",
        ),
        checks=CHECKS,
        baseline=Baseline(runs={KEY: (100.0,) * 3, "memory": (50.0,) * 3}),
        ends_at=time.monotonic() + deadline_s,
    )
    checks = tuple(Check(name=name, deadline_s=check_deadline_s) for name in sys.argv[4:])
    suite = replace(PREFLIGHT, name="scripted", checks=checks)
    for finding in run.findings(suite):
        print(finding.to_json(), flush=True)
    (FOLDER / "baseline").write_text(run.baseline.to_json())


if __name__ == "__main__":
    main()
