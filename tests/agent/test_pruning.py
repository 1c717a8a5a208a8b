"""What attempts leave on a node has a bound: oldest forgotten jobs first, then older attempts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from controller.agent.observe.log_sources import newest_attempt
from controller.agent.observe.pruning import AttemptFolder, Bounds, Pruning, excess, prune

MIB = 1 << 20
NOW_S = 1_000_000.0


def folder(job: str, attempt: int, *, forgotten: bool = False, mib: int = 10) -> AttemptFolder:
    return AttemptFolder(
        job=job,
        attempt=attempt,
        num_bytes=mib * MIB,
        written_s=float(attempt),
        is_forgotten=forgotten,
    )


def limit(max_bytes: int, max_age_s: float = 90 * 86_400.0) -> Bounds:
    return Bounds(max_bytes=max_bytes, max_age_s=max_age_s)


def names(folders: list[AttemptFolder]) -> list[str]:
    return [f"{each.job}/{each.attempt}" for each in folders]


def test_forgotten_jobs_go_first_the_oldest_before_all() -> None:
    here = [
        folder("new", 30, forgotten=True),
        folder("old", 10, forgotten=True),
        folder("old", 11, forgotten=True),
        *(folder("runs", attempt) for attempt in (1, 2, 3, 4)),
    ]
    assert excess(here, limit(70 * MIB), NOW_S) == []
    assert names(excess(here, limit(60 * MIB), NOW_S)) == ["old/10"]
    assert names(excess(here, limit(45 * MIB), NOW_S)) == ["old/10", "old/11", "new/30"]
    assert names(excess(here, limit(35 * MIB), NOW_S))[3:] == ["runs/1"]


def test_the_newest_two_attempts_of_a_job_stay_whatever_they_take() -> None:
    here = [folder("runs", attempt, mib=500) for attempt in (7, 8, 9)]
    assert names(excess(here, limit(MIB), NOW_S)) == ["runs/7"]


def test_a_thousand_attempts_of_a_job_that_runs_stay_within_the_bound() -> None:
    here = [folder("runs", attempt) for attempt in range(1, 1001)]
    assert excess(here, limit(10_000 * MIB), NOW_S) == []
    gone = {each.attempt for each in excess(here, limit(50 * MIB), NOW_S)}
    assert gone == set(range(1, 996))


def test_what_is_old_goes_though_there_is_room_but_for_the_newest_two_attempts() -> None:
    here = [
        folder("ended", 10, forgotten=True),
        folder("later", 999_000, forgotten=True),
        *(folder("runs", attempt) for attempt in (1, 2, 3)),
    ]
    bounds = limit(10_000 * MIB, max_age_s=86_400.0)
    assert names(excess(here, bounds, NOW_S)) == ["ended/10", "runs/1"]


def leave(jobs_dir: Path, job: str, attempt: int, age_s: float) -> Path:
    """What an attempt with one rank leaves: half a MiB of log and as much of a black box."""
    attempt_dir = jobs_dir / job / f"a{attempt}"
    attempt_dir.mkdir(parents=True)
    for name in ("rank-00000.log", "rank-00000.blackbox"):
        (attempt_dir / name).write_bytes(b"x" * (MIB // 2))
    for path in (*attempt_dir.iterdir(), attempt_dir):
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return attempt_dir


def test_files_are_deleted_until_the_rest_fits(tmp_path: Path) -> None:
    jobs_dir, memory_dir = tmp_path / "jobs", tmp_path / "memory"
    assert prune(jobs_dir, memory_dir, limit(MIB), NOW_S) == 0
    (memory_dir / "runs").mkdir(parents=True)
    left = leave(jobs_dir, "ended", 1, 5000.0)
    runs = [leave(jobs_dir, "runs", attempt, 1000.0 - attempt) for attempt in range(1, 9)]
    # Its host memory is about to be made.
    begins = leave(jobs_dir, "begins", 1, 1.0)
    assert prune(jobs_dir, memory_dir, limit(int(5.5 * MIB)), NOW_S) == 5
    assert not left.parent.exists()
    assert begins.exists()
    assert [path.exists() for path in runs] == [False] * 4 + [True] * 4
    assert newest_attempt(jobs_dir / "runs") == 8
    assert prune(jobs_dir, memory_dir, limit(int(5.5 * MIB)), NOW_S) == 0


def test_age_counts_once_the_clock_of_a_node_is_surely_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node may boot with a clock that is years ahead; nothing goes by age within the hour."""
    left = leave(tmp_path / "jobs", "ended", 1, NOW_S)
    begun_s = time.monotonic()
    pruning = Pruning(tmp_path, tmp_path / "memory", limit(64 * MIB), max_log_bytes=MIB)
    pruning.look()
    assert left.exists()
    monkeypatch.setattr(time, "monotonic", lambda: begun_s + 3700.0)
    pruning.look()
    assert not left.exists()


def test_a_look_also_shortens_the_log_of_the_standby_process(tmp_path: Path) -> None:
    log = tmp_path / "standby.log"
    log.write_bytes(b"a line\n" * (4 * MIB // 7))
    pruning = Pruning(tmp_path, tmp_path / "memory", limit(64 * MIB), max_log_bytes=MIB)
    pruning.look()
    assert log.stat().st_blocks * 512 < MIB
    log.unlink()
    pruning.look()
