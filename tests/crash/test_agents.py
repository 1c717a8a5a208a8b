"""Agents and standby processes that die on the way of a checkpoint, and what the next ones do."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from checkpoint import catalog
from checkpoint.core.retention import RetentionPolicy
from checkpoint.storage.storage import Storage
from checkpoint.upload.cleaning import Cleaner
from outlast.crashpoints import CrashPoint
from outlast.v1 import agents_pb2
from tests.agent.conftest import StartAgent, controller, memory_dir, start_agent
from tests.agent.harness import FakeController, start_command, wait_for
from tests.checkpoint.helpers import make_stager, make_tensors
from tests.crash.orders import DEADLINE_S, Orders

__all__ = ["controller", "memory_dir", "start_agent"]  # fixtures are found by their names here

START_POINTS = (CrashPoint.PLAN_MADE, CrashPoint.PLAN_KEPT)
COMMIT_POINTS = (CrashPoint.COMMIT_HEARD, CrashPoint.COMMIT_TOLD)
END_POINTS = (CrashPoint.JOB_FORGOTTEN, CrashPoint.UPLOADS_DRAINED, CrashPoint.MEMORY_FREED)
STANDBY_POINTS = (CrashPoint.STANDBY_FORKING, CrashPoint.STANDBY_FORKED)
WORKER_POINTS = (CrashPoint.WORKER_FORKED,)
POINTS = (*START_POINTS, *COMMIT_POINTS, *END_POINTS, *STANDBY_POINTS, *WORKER_POINTS)
STEP = 5


class Node:
    """A node whose agents obey orders to die, and a job of two ranks on it."""

    def __init__(self, start: StartAgent, control: FakeController, folder: Path) -> None:
        self.control = control
        self.store = folder / "store/job"
        self.url = f"file://{self.store}"
        self._port = control.start()
        self._start = start
        self.agent = start(self._port)

    @property
    def memory(self) -> Path:
        return self.agent.memory_dir / "job"

    def start_job(self, attempt: int) -> str:
        return self.control.command(start_command(attempt, checkpoint_url=self.url))

    def forget_job(self) -> str:
        """The controller sends an open command again, under its name."""
        return self.control.command(
            agents_pb2.Command(
                command_id="forget",
                job_id="job",
                attempt=2,
                forget_job=agents_pb2.ForgetJob(),
            )
        )

    def seal(self) -> None:
        """What both workers do: leave a step in host memory that storage wants."""
        for rank in range(2):
            tensors = make_tensors(STEP, rank=rank, ranks=2)
            stager = make_stager(self.memory, tensors, rank=rank, world_size=2)
            stager.save(STEP, {"step": STEP}, upload=True, common_step=-1)
            stager.close()

    def wait_death(self) -> None:
        """Wait until the agent has killed itself, and nothing of it is left."""
        assert self.agent.process.wait(DEADLINE_S) == -signal.SIGKILL
        wait_for(lambda: not self.agent.pids(), "an empty session", DEADLINE_S)

    def begin_again(self) -> None:
        num_hellos = len(self.control.hellos)
        self.agent = self._start(self._port)
        wait_for(lambda: len(self.control.hellos) > num_hellos, "a hello", DEADLINE_S)

    def wait_commit(self) -> None:
        wait_for(lambda: self.control.events("checkpoint_committed"), "a commit", DEADLINE_S)
        assert self.control.events("checkpoint_committed")[0].checkpoint_committed.step == STEP

    def assert_whole(self) -> None:
        """The checkpoint is in storage, whole and alone, and nothing stays beside it."""
        storage = Storage(self.url)
        for path in self.store.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path, (1, 1))
        Cleaner(storage, RetentionPolicy(keep=2), grace_s=60.0).sweep()
        assert storage.committed_steps() == [STEP]
        assert catalog.verify(storage, STEP, lambda num_bytes: None) == []
        # The agent sweeps as well, and for a moment has the file that tells it the store's time.
        wait_for(lambda: storage.unfinished() == [], "no unfinished files", DEADLINE_S)
        assert storage.entries(f"step-{STEP:08d}.1/parts") == []


@pytest.fixture
def node(
    start_agent: StartAgent,
    controller: FakeController,
    tmp_path: Path,
    orders: Orders,
    monkeypatch: pytest.MonkeyPatch,
) -> Node:
    for name, value in orders.environment.items():
        monkeypatch.setenv(name, value)
    return Node(start_agent, controller, tmp_path)


@pytest.mark.parametrize("point", START_POINTS)
def test_agent_that_dies_before_it_uploads_is_followed_by_one_that_does(
    point: CrashPoint, node: Node, orders: Orders
) -> None:
    orders.give(point)
    node.start_job(1)
    node.wait_death()
    assert orders.is_obeyed(point)
    node.seal()
    node.begin_again()
    assert node.control.result(node.start_job(2), DEADLINE_S).ok
    node.wait_commit()
    node.assert_whole()


@pytest.mark.parametrize("point", COMMIT_POINTS)
def test_commit_that_an_agent_did_not_live_to_tell_stands(
    point: CrashPoint, node: Node, orders: Orders
) -> None:
    assert node.control.result(node.start_job(1), DEADLINE_S).ok
    orders.give(point)
    node.seal()
    node.wait_death()
    assert orders.is_obeyed(point)
    node.assert_whole()
    node.begin_again()
    assert node.control.result(node.start_job(2), DEADLINE_S).ok
    assert node.control.result(node.forget_job(), DEADLINE_S).ok
    assert not node.memory.exists()
    node.assert_whole()


@pytest.mark.parametrize("point", END_POINTS)
def test_end_of_a_job_whose_agent_died_frees_its_memory_and_keeps_its_checkpoint(
    point: CrashPoint, node: Node, orders: Orders
) -> None:
    assert node.control.result(node.start_job(1), DEADLINE_S).ok
    orders.give(point)
    node.seal()
    node.forget_job()
    node.wait_death()
    assert orders.is_obeyed(point)
    node.begin_again()
    assert node.control.result(node.forget_job(), DEADLINE_S).ok
    assert not node.memory.exists()
    node.assert_whole()


@pytest.mark.parametrize("point", STANDBY_POINTS)
def test_standby_process_that_dies_with_a_fork_leaves_no_worker_behind(
    point: CrashPoint, node: Node, orders: Orders
) -> None:
    first = node.agent.standby_pid()
    orders.give(point)
    failed = node.control.result(node.start_job(1), DEADLINE_S)
    assert orders.is_obeyed(point)
    assert not failed.ok
    wait_for(lambda: node.agent.standby_pid() != first, "another standby process", DEADLINE_S)
    assert node.control.result(node.start_job(2), DEADLINE_S).ok
    node.control.progress("job", 2)
    # The agent, the standby process and the two workers of this attempt.
    wait_for(lambda: len(node.agent.pids()) == 4, "no worker of the first attempt", DEADLINE_S)


def test_worker_that_dies_as_it_is_forked_is_reported(node: Node, orders: Orders) -> None:
    (point,) = WORKER_POINTS
    orders.give(point)
    node.start_job(1)
    orders.wait(point)
    deaths = wait_for(lambda: node.control.events("worker_exited"), "its end", DEADLINE_S)
    assert deaths[0].worker_exited.exit.code == -signal.SIGKILL
    assert node.control.result(node.start_job(2), DEADLINE_S).ok
    node.control.progress("job", 2)
