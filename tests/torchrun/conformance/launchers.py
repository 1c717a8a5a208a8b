"""One script under torchrun and under `outlast run`, and what each of its ranks wrote down."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.cluster import wait_for

PROBE = Path(__file__).with_name("probe.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
OUTLAST = (sys.executable, "-m", "outlast.cli.main", "run")
# Of the tests themselves, and what would hide how a launcher sets it.
_OF_TESTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONUNBUFFERED")
_LIMIT_S = 120.0
_TYPED = "typed"
_STOPPED = re.compile(r"rank (\d+) is asked to stop by (\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a launcher ended, and what its ranks found, by attempt and rank as "0-1"."""

    code: int
    output: str
    found: Mapping[str, Mapping[str, Any]]
    errors: Mapping[str, Mapping[str, Any]]
    """What the ranks' error files have, without the time."""
    stopped_by: tuple[str, ...]
    """Signals by which ranks were asked to stop, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The words of a command line, which both launchers get, and what is theirs alone."""

    flags: tuple[str, ...]
    script: tuple[str, ...] = ("probe.py",)
    arguments: tuple[str, ...] = ()
    torchrun: tuple[tuple[str, ...], ...] = (("--standalone",),)
    """Flags of torchrun; there is a process for each."""
    outlast: tuple[str, ...] = ("--standalone",)
    environment: tuple[tuple[str, str], ...] = ()
    stopped_by: signal.Signals | None = None
    """Sent to the launcher when all ranks of the first attempt are up."""
    ranks: int = 1


def run(case: Case, folder: Path, launcher: Sequence[str]) -> Outcome:
    """Run a case under `TORCHRUN` or `OUTLAST`, in a folder of its own."""
    for made in ("out", "tmp"):
        (folder / made).mkdir(parents=True)
    shutil.copy(PROBE, folder / "probe.py")
    if launcher == TORCHRUN:
        # Error files are below it, and are deleted otherwise.
        each = [(*flags, "--log-dir", str(folder / "tmp")) for flags in case.torchrun]
    else:
        each = [case.outlast]
    processes = []
    for flags in each:
        command = [*launcher, *flags, *case.flags, *case.script, "out", *case.arguments]
        processes.append(_start(command, case, folder))
    try:
        if case.stopped_by is not None:
            wanted = [folder / "out" / f"0-{rank}.json" for rank in range(case.ranks)]
            wait_for(lambda: all(path.exists() for path in wanted), "ranks to be up")
            for process in processes:
                process.send_signal(case.stopped_by)
        outputs = [process.communicate(timeout=_LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    (code,) = {process.returncode for process in processes}
    output = "".join(outputs)
    found = {path.stem: _read(path) for path in sorted((folder / "out").glob("*.json"))}
    errors = {}
    for rank, facts in found.items():
        path = Path(facts["environment"]["TORCHELASTIC_ERROR_FILE"])
        if path.exists():
            errors[rank] = _read(path)
            del errors[rank]["message"]["extraInfo"]["timestamp"]
    return Outcome(
        code=code,
        output=output,
        found={rank: _relative(facts, folder) for rank, facts in found.items()},
        errors={rank: _relative(error, folder) for rank, error in errors.items()},
        stopped_by=tuple(each[1] for each in sorted(_STOPPED.findall(output))),
    )


def _start(command: Sequence[str], case: Case, folder: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in _OF_TESTS}
    environment |= {"TMPDIR": str(folder / "tmp"), "OWN": "of the user"}
    (folder / "typed").write_text(_TYPED)
    with (folder / "typed").open() as typed:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment | dict(case.environment),
            stdin=typed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A Ctrl-C of whoever runs the tests is not the launcher's.
            start_new_session=True,
        )


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _relative(facts: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Without the folder, which is another one for each launcher."""
    found: dict[str, Any] = json.loads(json.dumps(facts).replace(str(folder), "FOLDER"))
    return found


def differences(torchrun: Outcome, outlast: Outcome) -> Iterator[tuple[str, Any, Any]]:
    """What is not the same: its name and both values."""
    for name in ("code", "errors", "stopped_by"):
        values = getattr(torchrun, name), getattr(outlast, name)
        if values[0] != values[1]:
            yield f"launcher: {name}", *values
    for rank in sorted({*torchrun.found, *outlast.found}):
        for part in ("environment", "process", "group"):
            theirs = torchrun.found.get(rank, {}).get(part, {})
            ours = outlast.found.get(rank, {}).get(part, {})
            for name in sorted({*theirs, *ours}):
                if theirs.get(name) != ours.get(name):
                    yield f"{part}: {name}", theirs.get(name), ours.get(name)
