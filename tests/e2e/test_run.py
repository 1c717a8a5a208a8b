"""`outlast run` in real processes: what a script sees, how it ends, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.cluster import wait_for

_MARK = "OUTLAST_TEST_RUN"
_LIMIT_S = 120.0

_TWO_RANKS = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OWN")
print(json.dumps([[os.environ[name] for name in names], sys.argv[1:], os.getcwd()]))
print("to stderr", file=sys.stderr)
"""
_STOPS = """
import signal, sys, time
def stop(number, frame):
    print("stopping", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
time.sleep(600)
"""
_RAISES = """
def work():
    raise KeyError("text")
print("at work", flush=True)
work()
"""
_FAILS_ONCE = """
import os, signal
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs scripts, each in a folder of its own; all their processes are marked."""

    folder: Path

    def command(self, script: str, *flags: str, arguments: tuple[str, ...] = ()) -> list[str]:
        (self.folder / "train.py").write_text(script)
        return [sys.executable, "-m", "outlast.cli.main", "run", *flags, "train.py", *arguments]

    def begin(self, script: str, *flags: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(script, *flags),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, script: str, *flags: str, arguments: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(script, *flags, arguments=arguments),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )

    @property
    def environment(self) -> dict[str, str]:
        # The state of a run goes below the test's own folder.
        own = {_MARK: str(self.folder), "OWN": "mine", "TMPDIR": str(self.folder / "tmp")}
        return {**os.environ, **own}

    @property
    def states(self) -> list[Path]:
        """State folders that were kept."""
        return sorted((self.folder / "tmp").glob("outlast-run-*"))

    def processes(self) -> list[int]:
        """All that the runs have started and that is still there."""
        wanted = f"{_MARK}={self.folder}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    (tmp_path / "tmp").mkdir()
    it = Runner(folder=tmp_path)
    yield it
    wait_for(lambda: not it.processes(), "the processes of a run to be gone")


def test_two_ranks_have_the_environment_of_torchrun_and_that_of_the_user(runner: Runner) -> None:
    done = runner.run(_TWO_RANKS, "--nproc-per-node", "2", arguments=("--lr", "1"))
    assert done.returncode == 0, done.stderr
    where = f'["--lr", "1"], "{runner.folder}"]'
    for rank in range(2):
        own = [line for line in done.stdout.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert [line.partition("] ")[2] for line in own] == [
            f'[["{rank}", "{rank}", "2", "2", "0", "mine"], {where}',
            "to stderr",
        ]
    assert done.stderr == ""
    assert runner.states == []
    assert not runner.processes()


def test_nodes_are_played_on_this_machine(runner: Runner) -> None:
    done = runner.run(_TWO_RANKS, "--nodes", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(line[:41] for line in done.stdout.splitlines() if "[[" in line) == [
        '[rank 0] [["0", "0", "2", "1", "0", "mine',
        '[rank 1] [["1", "0", "2", "1", "1", "mine',
    ]


def test_a_script_that_fails_shows_its_traceback_and_passes_its_exit_code_on(
    runner: Runner,
) -> None:
    done = runner.run(_RAISES, "--max-restarts", "0")
    assert done.returncode == 1
    assert done.stdout.startswith("at work\n")
    assert "KeyError: 'text'" in done.stdout
    assert "outlast: train-" in done.stderr
    assert " failed: " in done.stderr
    (kept,) = runner.states
    assert f"outlast: logs and state are kept in {kept}" in done.stderr


def test_the_exit_code_of_a_script_is_that_of_the_command(runner: Runner) -> None:
    done = runner.run("raise SystemExit(7)", "--max-restarts", "0")
    assert done.returncode == 7, done.stderr


def test_a_rank_that_is_killed_is_started_again_and_that_is_said(runner: Runner) -> None:
    done = runner.run(_FAILS_ONCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["attempt 0", "attempt 1"]
    assert "outlast: fault: rank 0 on node-0 failed: killed by SIGKILL" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_script_in_order_and_leaves_nothing(
    runner: Runner, number: signal.Signals
) -> None:
    process = runner.begin(_STOPS)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 128 + number
    assert out == "stopping\n"
    assert "outlast: stopping the script; Ctrl-C once more kills it" in err
    assert not runner.processes()
    assert runner.states == []


def test_nothing_is_left_of_a_command_that_is_killed(runner: Runner) -> None:
    process = runner.begin(_STOPS, "--nproc-per-node", "2")
    assert process.stdout is not None
    assert process.stdout.readline().endswith("up\n")
    assert len(runner.processes()) > 3
    process.kill()
    process.communicate()
    wait_for(lambda: not runner.processes(), "controller, node and ranks to end")


def test_output_goes_to_the_log_dir(runner: Runner) -> None:
    flags = ("--nproc-per-node", "2", "--log-dir", "logs", "--redirects", "3", "--tee", "0:3")
    done = runner.run("print('here')", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[rank 0] here\n"
    written = sorted((runner.folder / "logs").glob("*/attempt_0/*/output.log"))
    assert [(path.parent.name, path.read_text()) for path in written] == [
        ("0", "here\n"),
        ("1", "here\n"),
    ]


def test_a_pipe_that_nobody_reads_ends_the_run(runner: Runner) -> None:
    script = "import time\nwhile True:\n    print('x' * 100, flush=True)\n    time.sleep(0.01)"
    process = runner.begin(script)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.read()
    process.stderr.close()
    assert process.wait(_LIMIT_S) == 128 + signal.SIGPIPE
    assert not runner.processes()


def test_output_that_cannot_be_written_is_said_and_the_script_runs_on(runner: Runner) -> None:
    script = "print('x', flush=True)\nopen('done', 'w').close()"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            runner.command(script),
            cwd=runner.folder,
            env=runner.environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    assert done.returncode == 1
    assert (runner.folder / "done").exists()
    assert "output cannot be written: No space left on device; the script runs on" in done.stderr
    assert "logs and state are kept in " in done.stderr
    assert "Traceback" not in done.stderr
