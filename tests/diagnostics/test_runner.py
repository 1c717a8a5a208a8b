"""The runner: checks as processes with deadlines, repeats, and what it remembers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diagnostics.core.baseline import Baseline
from diagnostics.core.finding import CheckVerdict, Finding
from diagnostics.core.verdicts import fold
from tests.diagnostics.build import KEY


def command(folder: Path, *checks: str, deadline_s: float, check_deadline_s: float) -> list[str]:
    arguments = [str(folder), str(deadline_s), str(check_deadline_s), *checks]
    return [sys.executable, "-m", "tests.diagnostics.scripted", *arguments]


def run(
    folder: Path, *checks: str, deadline_s: float = 60.0, check_deadline_s: float = 30.0
) -> list[Finding]:
    done = subprocess.run(
        command(folder, *checks, deadline_s=deadline_s, check_deadline_s=check_deadline_s),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    )
    return [Finding.from_json(line) for line in done.stdout.splitlines()]


def verdicts(findings: list[Finding]) -> list[CheckVerdict]:
    return [finding.verdict for finding in findings]


def remembered(folder: Path) -> Baseline:
    return Baseline.from_json((folder / "baseline").read_text())


def tries(folder: Path) -> int:
    return int((folder / "tries").read_text())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition: object, what: str, timeout_s: float = 30.0) -> None:
    assert callable(condition)
    ends_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_at, f"timed out: {what}"
        time.sleep(0.01)


def test_healthy_values_pass_and_enter_the_baseline(tmp_path: Path) -> None:
    assert verdicts(run(tmp_path, "good")) == [CheckVerdict.PASS]
    assert remembered(tmp_path).runs[KEY] == (100.0,) * 4


def test_checks_run_in_the_order_of_the_suite(tmp_path: Path) -> None:
    found = run(tmp_path, "good", "skips", "raises")
    assert [finding.test for finding in found] == ["compute", "skips", "raises"]
    assert verdicts(found) == [CheckVerdict.PASS, CheckVerdict.SKIP, CheckVerdict.ERROR]
    assert found[1].detail == "there is no such device"
    assert found[2].detail == "OSError: the driver is gone"


def test_what_a_check_prints_never_mixes_with_findings(tmp_path: Path) -> None:
    assert verdicts(run(tmp_path, "prints")) == [CheckVerdict.PASS]


def test_check_past_its_deadline_is_killed_with_its_children(tmp_path: Path) -> None:
    found = run(tmp_path, "hangs", "good", check_deadline_s=5.0)
    assert verdicts(found) == [CheckVerdict.PASS, CheckVerdict.INCONCLUSIVE, CheckVerdict.PASS]
    assert found[1].detail == "still running after 5 s, so it was killed"
    assert fold(found).verdict is CheckVerdict.INCONCLUSIVE
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=int(pid): not is_running(pid), f"process {pid} ends")


def test_checks_die_with_a_killed_runner(tmp_path: Path) -> None:
    runner = subprocess.Popen(
        command(tmp_path, "hangs", deadline_s=600, check_deadline_s=600),
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until((tmp_path / "pids").exists, "the check hangs")
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=int(pid): not is_running(pid), f"process {pid} ends")


def test_programs_of_a_check_die_with_it_at_its_deadline(tmp_path: Path) -> None:
    program = tmp_path / "ib_write_bw"
    program.write_text(f"#!/bin/sh\necho waiting\necho $$ >> {tmp_path}/pids\nexec sleep 600\n")
    program.chmod(0o755)
    (tmp_path / "devices" / "mlx5_0").mkdir(parents=True)
    found = run(tmp_path, "rdma_to_itself", check_deadline_s=5.0)
    assert verdicts(found) == [CheckVerdict.INCONCLUSIVE]
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    for pid in pids:
        wait_until(lambda pid=int(pid): not is_running(pid), f"process {pid} ends")


def test_crash_of_a_check_is_an_error_and_not_bad_hardware(tmp_path: Path) -> None:
    found = run(tmp_path, "crashes")
    assert verdicts(found) == [CheckVerdict.PASS, CheckVerdict.ERROR]
    assert found[1].detail == "the check's process: killed by SIGSEGV"
    assert fold(found).verdict is CheckVerdict.ERROR


def test_slow_value_is_believed_after_three_tries(tmp_path: Path) -> None:
    found = run(tmp_path, "slow")
    assert [(finding.test, finding.verdict) for finding in found] == [
        ("memory", CheckVerdict.PASS),
        ("compute", CheckVerdict.FAIL),
    ]
    assert found[1].detail == "10% of its own median 100 GFLOP/s; try 3"
    assert tries(tmp_path) == 3
    assert remembered(tmp_path).num_runs("memory") == 4
    assert remembered(tmp_path).runs[KEY] == (100.0,) * 3


def test_value_that_was_slow_by_chance_passes(tmp_path: Path) -> None:
    found = run(tmp_path, "slow_once")
    assert verdicts(found) == [CheckVerdict.PASS, CheckVerdict.PASS]
    assert found[1].detail == "95% of its own median 100 GFLOP/s; try 2"
    assert tries(tmp_path) == 2
    assert remembered(tmp_path).runs[KEY] == (100.0, 100.0, 100.0, 95.0)


def test_slow_value_without_time_for_a_repeat_is_inconclusive(tmp_path: Path) -> None:
    found = run(tmp_path, "slow_and_long", deadline_s=3.0)
    assert verdicts(found) == [CheckVerdict.INCONCLUSIVE]
    assert found[0].detail.endswith("it could not be repeated")
    assert tries(tmp_path) == 1


def test_wrong_data_is_believed_at_once(tmp_path: Path) -> None:
    found = run(tmp_path, "flips")
    assert verdicts(found) == [CheckVerdict.FAIL]
    assert tries(tmp_path) == 1


def test_check_without_time_left_is_inconclusive(tmp_path: Path) -> None:
    found = run(tmp_path, "good", deadline_s=0.01)
    assert verdicts(found) == [CheckVerdict.INCONCLUSIVE]
    assert found[0].detail == "no time was left for it"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--workers", "0"], "--workers is 0; it must be 1 or more"),
        (["--deadline-s", "0"], "--deadline-s is 0.0; it must be more than 0"),
        (["--suite", "forever"], "invalid choice: 'forever'"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, changed: list[str], said: str) -> None:
    arguments = ["--suite", "preflight", "--node", "n", "--workers", "2", "--deadline-s", "9"]
    arguments += ["--baseline-file", str(tmp_path / "baseline.json"), *changed]
    done = subprocess.run(
        [sys.executable, "-m", "diagnostics.runner", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    assert said in done.stderr
