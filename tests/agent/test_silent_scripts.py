"""Scripts that report nothing: with real processes, and looks at moments that the tests choose."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.agent.core.reports import Reports
from controller.agent.observe.reporter import Reporter
from controller.agent.observe.stall_watch import LOOK_PERIOD_S, StallWatch
from controller.agent.workers.cpu_time import cpu_time_s
from controller.agent.workers.processes import child_pids, process_state
from controller.agent.workers.worker import Worker
from controller.core.edge.judgement import HangJudgement, HangSign, is_over, is_stopped
from controller.core.events import JobStalled
from diagnostics.core.pace import KNOWN_PASSES, STOPPED_S, UNNAMED_FLOOR_S, WARM_UP_STEPS
from outlast.blackbox import Group, Op, StepRecord, Writer
from outlast.clock import node_time_ns
from outlast.ids import Attempt, JobId
from outlast.layout import Layout
from outlast.session.process import Session
from outlast.v1 import agents_pb2
from outlast.worker_contract import WorkerFiles
from tests.agent.harness import wait_for

LIMIT_S = 10.0
# They end with their input.
SLEEPS = "import sys\nprint('ready', flush=True)\nsys.stdin.read()"
PRINTS = "import sys\nprint('ready', flush=True)\nfor line in sys.stdin: print(line, flush=True)"
SPINS = "while True: pass"
# The child spins; what it is for, its parent does not do.
HAS_A_CHILD_THAT_SPINS = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SPINS!r}])
try:
    sys.stdin.read()
finally:
    child.kill()
"""
# Each child works for 0.1 s of CPU time and ends.
HAS_SHORT_CHILDREN = """
import subprocess, sys
work = "import time\\nwhile time.process_time() < 0.1: pass"
while True:
    subprocess.run([sys.executable, "-c", work])
"""
# More than the constant part of what an idle process may use, and than its share of a second.
WORK_S = 0.1


@dataclass
class Script:
    """A worker whose process runs a program of the test."""

    worker: Worker
    box: Writer
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def cpu_s(self) -> float:
        found = cpu_time_s(self.pid, None)
        assert found is not None
        return found

    def print_line(self) -> None:
        """Have the program print one, and wait for it."""
        size = self.worker.paths.log.stat().st_size
        assert self.process.stdin is not None
        self.process.stdin.write(b"line\n")
        self.process.stdin.flush()
        wait_for(lambda: self.worker.paths.log.stat().st_size > size, "a line of output")


@contextmanager
def script_of(folder: Path, program: str, *, rank: int = 0, num_ranks: int = 1) -> Iterator[Script]:
    """The program as a rank that has opened its black box and says nothing more."""
    loop = asyncio.new_event_loop()
    paths = WorkerFiles.below(folder, rank)
    box = Writer(paths.blackbox, rank=rank, world_size=num_ranks, attempt=1)
    with paths.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
    worker = Worker(
        job_id="job",
        attempt=1,
        rank=rank,
        paths=paths,
        requested_ns=0,
        gone=loop.create_future(),
        pid=process.pid,
        silent_limit_s=LIMIT_S,
    )
    try:
        yield Script(worker=worker, box=box, process=process)
    finally:
        assert process.stdin is not None
        # A parent ends its child; what does not read is killed.
        process.stdin.close()
        if program not in (SLEEPS, PRINTS, HAS_A_CHILD_THAT_SPINS):
            process.kill()
        process.send_signal(signal.SIGCONT)
        process.wait()
        worker.close()
        box.close()
        loop.close()


class Watch:
    """A stall watch of scripts, whose time goes on when a test says so."""

    def __init__(self, *scripts: Script) -> None:
        self.workers = [script.worker for script in scripts]
        self.crossed: list[float] = []
        self.now_s = 1_000.0
        self.reporter = Reporter(lambda event, weight: None, lambda: False, Reports())
        self.stall_watch = StallWatch(
            lambda: self.workers, lambda: self.crossed.append(self.now_s - 1_000.0)
        )
        self.stall_watch.look(self.now_s)

    def pass_time(self, length_s: float) -> None:
        """Look as often as an agent does in so many seconds."""
        for _ in range(round(length_s / LOOK_PERIOD_S)):
            self.now_s += LOOK_PERIOD_S
            self.stall_watch.look(self.now_s)

    def summary(self, worker: Worker) -> agents_pb2.RankSummary:
        """As a heartbeat has it."""
        summary = self.reporter.summary(worker)
        self.stall_watch.describe(worker, summary)
        return summary


def wait_asleep(script: Script) -> None:
    """Until the program has started and waits for its input."""
    log = script.worker.paths.log
    wait_for(
        lambda: b"ready" in log.read_bytes() and process_state(script.pid) == "S",
        "the program to wait",
    )


def works_on(script: Script, watch: Watch, length_s: float) -> None:
    """Let so many seconds pass, in each of which the script works for a tenth of one."""
    for _ in range(round(length_s)):
        target_s = script.cpu_s() + WORK_S
        wait_for(lambda target_s=target_s: script.cpu_s() >= target_s, "the script to work")
        watch.pass_time(1.0)


def test_a_script_that_sleeps_is_told_once_with_its_limit(tmp_path: Path) -> None:
    with script_of(tmp_path, SLEEPS) as script:
        wait_asleep(script)
        watch = Watch(script)
        watch.pass_time(LIMIT_S - 1.0)
        assert not watch.crossed
        within = watch.summary(script.worker)
        assert within.reports_no_steps
        assert not is_over(within)
        watch.pass_time(3.0)
        summary = watch.summary(script.worker)
        assert is_over(summary)
        assert not is_stopped(summary)
        assert summary.stall_limit_s == LIMIT_S
        assert summary.stall_limit_source == "recovery.hang_timeout_s is 10 s"
        assert summary.process_state == "S"
        assert len(watch.crossed) == 1


@pytest.mark.parametrize(
    "program", [SPINS, HAS_A_CHILD_THAT_SPINS, HAS_SHORT_CHILDREN], ids=["own", "child", "children"]
)
def test_a_script_that_uses_a_cpu_is_not_silent(tmp_path: Path, program: str) -> None:
    with script_of(tmp_path, program) as script:
        watch = Watch(script)
        works_on(script, watch, 2 * LIMIT_S)
        assert not watch.crossed
        assert watch.summary(script.worker).stalled_s <= 2.0


def test_a_script_that_prints_is_silent_only_after_its_last_line(tmp_path: Path) -> None:
    with script_of(tmp_path, PRINTS) as script:
        wait_asleep(script)
        watch = Watch(script)
        for _ in range(3):
            watch.pass_time(LIMIT_S - 2.0)
            script.print_line()
        assert not watch.crossed
        watch.pass_time(LIMIT_S + 2.0)
        assert len(watch.crossed) == 1
        script.print_line()
        watch.pass_time(1.2)
        assert len(watch.crossed) == 2, "that it moves again is reported, too"
        assert not is_over(watch.summary(script.worker))


def test_a_script_that_is_stopped_is_told_long_before_its_limit(tmp_path: Path) -> None:
    with script_of(tmp_path, SPINS) as script:
        watch = Watch(script)
        works_on(script, watch, 2.0)
        script.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: process_state(script.pid) == "T", "the script to stop")
        # Its last work is seen at the next look.
        watch.pass_time(1.0 + STOPPED_S + 1.0)
        summary = watch.summary(script.worker)
        assert is_stopped(summary)
        assert "stopped by a signal" in summary.stall_limit_source


def take_steps(script: Script, watch: Watch) -> None:
    """Report enough short steps to know how long one takes, and name nothing in them."""
    contract: Any = None
    session = Session(contract=contract, box=script.box, settings={}, stop_signal=signal.SIGTERM)
    for step in range(1, WARM_UP_STEPS + KNOWN_PASSES + 3):
        now_ns = node_time_ns()
        session.step(
            StepRecord(
                step=step,
                loss=1.0,
                grad_norm=0.0,
                learning_rate=0.0,
                tokens=1,
                start_ns=now_ns,
                end_ns=now_ns,
                eval_loss=None,
            )
        )
        watch.pass_time(LOOK_PERIOD_S)


def test_a_script_that_stands_in_a_step_without_a_sign_of_life_is_told(tmp_path: Path) -> None:
    with script_of(tmp_path, SLEEPS) as script:
        wait_asleep(script)
        watch = Watch(script)
        take_steps(script, watch)
        watch.pass_time(UNNAMED_FLOOR_S - 5.0)
        assert not watch.crossed
        watch.pass_time(15.0)
        summary = watch.summary(script.worker)
        assert is_over(summary)
        assert not summary.reports_no_steps
        assert summary.stall_limit_source.startswith("10 x the longest step ")


def test_a_script_that_evaluates_in_a_step_without_naming_it_moves(tmp_path: Path) -> None:
    with script_of(tmp_path, SPINS) as script:
        watch = Watch(script)
        take_steps(script, watch)
        works_on(script, watch, UNNAMED_FLOOR_S + 10.0)
        assert not watch.crossed


def test_a_script_that_is_stopped_in_a_step_is_found_by_what_steps_took(tmp_path: Path) -> None:
    with script_of(tmp_path, SPINS) as script:
        watch = Watch(script)
        take_steps(script, watch)
        script.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: process_state(script.pid) == "T", "the script to stop")
        watch.pass_time(2.0)
        assert is_stopped(watch.summary(script.worker))


def judgement(summaries: list[agents_pb2.RankSummary], sign: HangSign) -> JobStalled:
    """What the controller makes of a hang of these ranks."""
    found = HangJudgement(
        job_id=JobId("job"),
        attempt=Attempt(1),
        sign=sign,
        world_size=len(summaries),
        layout=Layout(dp=len(summaries)),
        summaries={summary.rank: summary for summary in summaries},
        wall_s=2_000.0,
        stopped=tuple(summary for summary in summaries if is_stopped(summary)),
    ).judge()
    assert isinstance(found, JobStalled)
    return found


@contextmanager
def three_that_sleep(folder: Path) -> Iterator[list[Script]]:
    """They stand for ranks that wait for each other without a word."""
    with ExitStack() as stack:
        scripts = [
            stack.enter_context(script_of(folder, SLEEPS, rank=rank, num_ranks=3))
            for rank in range(3)
        ]
        for script in scripts:
            wait_asleep(script)
        yield scripts


@pytest.mark.parametrize("idle_s", [0.0, 8.0], ids=["at once", "after a while"])
def test_ranks_that_wait_for_a_stopped_one_are_not_blamed(tmp_path: Path, idle_s: float) -> None:
    with three_that_sleep(tmp_path) as scripts:
        watch = Watch(*scripts)
        watch.pass_time(idle_s)
        scripts[1].process.send_signal(signal.SIGSTOP)
        wait_for(lambda: process_state(scripts[1].pid) == "T", "the script to stop")
        if not idle_s:
            watch.pass_time(STOPPED_S + 2.0)
        else:
            # It has stood for longer than a stopped one may.
            watch.pass_time(LOOK_PERIOD_S)
        summaries = [watch.summary(script.worker) for script in scripts]
        assert [is_over(summary) for summary in summaries] == [False, True, False]
        found = judgement(summaries, HangSign.STOPPED)
        assert found.culprit_ranks == (1,)
        assert "rank 1 stopped by a signal" in found.detail


def test_of_ranks_that_are_all_silent_none_is_blamed(tmp_path: Path) -> None:
    with three_that_sleep(tmp_path) as scripts:
        watch = Watch(*scripts)
        watch.pass_time(LIMIT_S + 3.0)
        summaries = [watch.summary(script.worker) for script in scripts]
        assert all(is_over(summary) for summary in summaries)
        found = judgement(summaries, HangSign.ALL_STAND)
        assert found.culprit_ranks == ()
        assert found.limit == "recovery.hang_timeout_s is 10 s"
        assert "not known" in found.detail
        # As `outlast incidents show` prints it.
        assert found.stood == (
            "ranks 0-2 at an operation that is not known "
            "(no output and hardly any CPU time for 13 s, asleep)"
        )


def test_a_script_that_reports_an_operation_is_watched_by_its_box(tmp_path: Path) -> None:
    with script_of(tmp_path, PRINTS) as script:
        wait_asleep(script)
        watch = Watch(script)
        script.box.enter(Op.ALL_REDUCE, Group.WORLD)
        watch.pass_time(LOOK_PERIOD_S)
        script.print_line()
        watch.pass_time(LIMIT_S)
        summary = watch.summary(script.worker)
        assert not summary.reports_no_steps
        assert summary.stalled_s == pytest.approx(LIMIT_S, abs=0.1)
        assert "not known yet" in summary.stall_limit_source


def test_a_script_that_has_ended_is_no_trouble(tmp_path: Path) -> None:
    with script_of(tmp_path, SPINS) as script:
        watch = Watch(script)
        script.process.kill()
        script.process.wait()
        watch.pass_time(3.0)
        assert cpu_time_s(script.pid, None) is None
        assert child_pids(script.pid) == []


def test_a_cgroup_knows_the_time_of_all_that_ran_in_it(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("usage_usec 12500000\nuser_usec 1\nsystem_usec 2\n")
    assert cpu_time_s(os.getpid(), tmp_path) == 12.5


@pytest.mark.parametrize("text", ["", "usage_usec x\n", "user_usec 1\n", None])
def test_without_the_cgroup_s_count_the_tree_is_summed_up(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "cpu.stat").write_text(text)
    found = cpu_time_s(os.getpid(), tmp_path)
    assert found is not None
    assert found > 0.0
