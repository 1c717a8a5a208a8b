"""The wall clock of a node is set while it works: nothing expires, freezes or is blamed."""

from __future__ import annotations

import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from checkpoint.core.slots import UploadState
from controller.agent.observe.leftovers import KEPT_LOGS, delete_old_logs
from outlast.blackbox import Group, Op, Phase, Reader, Writer
from outlast.spec.parse import parse_spec
from tests.agent.conftest import StartAgent
from tests.agent.faults.node import seal_slot
from tests.agent.harness import (
    REPOSITORY,
    FakeController,
    start_command,
    stop_command,
    wait_for,
)

HOUR_S, DAY_S = 3_600.0, 86_400.0
STEPS_S = (HOUR_S, -HOUR_S, DAY_S, -DAY_S)
# What the test's own pauses may add up to on a busy machine; the steps are far beyond.
MOST_S = 60.0


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that steps the wall clock of processes started from now on."""
    path = tmp_path / "clock"
    path.write_bytes(bytes(8))
    monkeypatch.setenv("OUTLAST_TEST_CLOCK", str(path))
    stepped = Path(__file__).with_name("stepped")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(stepped), str(REPOSITORY))))
    return path


def step(clock: Path, by_s: float) -> None:
    with clock.open("r+b") as file:
        file.write(struct.pack("<q", int(by_s * 1e9)))


@pytest.mark.parametrize("by_s", STEPS_S)
def test_step_of_a_nodes_clock_ages_nothing_and_ends_nothing(
    controller: FakeController,
    start_agent: StartAgent,
    clock: Path,
    tmp_path: Path,
    by_s: float,
) -> None:
    agent = start_agent(controller.start())
    for rank in (0, 1):
        seal_slot(agent.memory_dir / "job", rank=rank, world_size=2, upload=UploadState.NONE)
    url = (tmp_path / "storage").as_uri()
    began_s = time.time()
    spec = parse_spec(
        {"name": "job", "parallel": {"dp": 2}, "steps": 1_000_000, "data": {"loader": "rank"}}
    )
    start: dict[str, Any] = {"checkpoint_url": url, "spec_json": spec.canonical_json()}
    assert controller.result(controller.command(start_command(**start))).ok
    controller.comes_to(3)

    step(clock, by_s)
    since = len(controller.received)
    # An upload that begins after the step has slots from before it.
    for rank in (0, 1):
        seal_slot(agent.memory_dir / "job", rank=rank, world_size=2, upload=UploadState.WANTED)
    standby = agent.standby_pid()
    os.kill(standby, signal.SIGKILL)
    wait_for(lambda: agent.standby_pid() != standby, "another standby process")
    wait_for(lambda: len(controller.heartbeats()) > 10, "heartbeats")
    wait_for(lambda: controller.events("checkpoint_committed", since), "a checkpoint")
    wait_for(lambda: controller.events("step_reports", since), "steps")
    controller.comes_to(4, since=since)
    wait_for(lambda: "the wall clock stepped by" in agent.log.read_text(), "a word about it")
    stopped = controller.result(controller.command(stop_command(1, graceful=True)))
    assert stopped.ok, stopped
    # A new attempt is started by the standby process that was made after the step.
    assert controller.result(controller.command(start_command(2, **start))).ok
    controller.progress("job", 2)
    assert controller.result(controller.command(stop_command(2))).ok

    assert len(controller.hellos) == 1
    assert agent.process.poll() is None
    check_times(controller, began_s)
    assert not controller.events("checkpoint_trouble")
    (committed,) = controller.events("checkpoint_committed")
    assert 0.0 <= committed.checkpoint_committed.total_s < MOST_S
    assert 0.0 <= committed.checkpoint_committed.stalled_s < MOST_S


def check_times(controller: FakeController, began_s: float) -> None:
    """Moments are those of the test, in order; ages and durations are short."""
    for beat in controller.heartbeats():
        assert began_s - MOST_S < beat.at_s < began_s + MOST_S
        for rank in beat.ranks:
            assert rank.step_age_s < MOST_S
            assert rank.last_op_age_s < MOST_S
            assert rank.stalled_s < MOST_S
    for report in controller.events("step_reports"):
        for row in report.step_reports.reports:
            assert 0.0 < row.duration_s < MOST_S
    for made in controller.events("progress"):
        split = dict(made.progress.start_split_s)
        assert all(0.0 <= part < MOST_S for part in split.values()), split
    moments = [
        message.event.at_s
        for _, message in controller.received
        if message.WhichOneof("kind") == "event"
    ]
    assert moments == sorted(moments)
    for exited in controller.events("worker_exited"):
        assert began_s - MOST_S < exited.worker_exited.exit.at_s < began_s + MOST_S
        assert exited.worker_exited.exit.stopped


@pytest.mark.parametrize("by_s", STEPS_S)
def test_time_that_a_rank_spends_is_not_that_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    path = tmp_path / "rank.blackbox"
    writer = Writer(path, rank=0, world_size=1, attempt=1)
    writer.phase(Phase.CHECKPOINT)
    writer.enter(Op.ALL_REDUCE, Group.DP)
    of_machine = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: of_machine() + int(by_s * 1e9))
    writer.leave()
    writer.phase(Phase.OPTIMIZER)
    reader = Reader(path)
    use = reader.time_use()
    assert 0.0 < use.phases_s[Phase.CHECKPOINT] < MOST_S
    assert 0.0 < use.operations_s[Phase.CHECKPOINT, Group.DP] < MOST_S
    assert reader.present().op_left_ns >= reader.present().op_entered_ns
    reader.close()
    writer.close()


def test_logs_of_the_job_that_was_just_forgotten_stay_though_the_clock_was_set_back(
    tmp_path: Path,
) -> None:
    jobs_dir, memory_dir = tmp_path / "jobs", tmp_path / "memory"
    now_s = time.time()
    for number in range(KEPT_LOGS):
        (jobs_dir / f"old{number}").mkdir(parents=True)
        os.utime(jobs_dir / f"old{number}", (now_s + number, now_s + number))
    # Two jobs of the day before, as the clock says now.
    for number, name in enumerate(("new0", "new1")):
        (jobs_dir / name).mkdir()
        os.utime(jobs_dir / name, (now_s - DAY_S + number, now_s - DAY_S + number))
        delete_old_logs(jobs_dir, memory_dir, newest=name)
    left = {path.name for path in jobs_dir.iterdir()}
    assert left == {"new0", "new1", *(f"old{number}" for number in range(2, KEPT_LOGS))}
