"""A controller and an agent per test; nothing of the agent's session outlives it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.agent.harness import AgentProcess, FakeController, wait_for

StartAgent = Callable[..., AgentProcess]


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A folder on tmpfs."""
    folder = Path("/dev/shm") / f"outlast-test-{uuid4().hex[:8]}"
    yield folder / "n0"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def controller() -> Iterator[FakeController]:
    controller = FakeController()
    yield controller
    controller.stop()


@pytest.fixture
def start_agent(tmp_path: Path, memory_dir: Path) -> Iterator[StartAgent]:
    """Starts agents on the same folders; `port` is the controller's."""
    agents: list[AgentProcess] = []

    def start(port: int, *extra: str, **options: Path) -> AgentProcess:
        agents.append(AgentProcess(tmp_path, memory_dir, port, *extra, **options))
        return agents[-1]

    yield start
    for agent in agents:
        agent.close()


@pytest.fixture
def agent(controller: FakeController, start_agent: StartAgent) -> AgentProcess:
    """An agent that talks to `controller`."""
    return start_agent(controller.start())


@pytest.fixture(scope="module")
def shared_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeController]:
    """The controller of an agent for tests that leave no trace in it."""
    controller = FakeController()
    memory_dir = Path("/dev/shm") / f"outlast-test-{uuid4().hex[:8]}"
    agent = AgentProcess(tmp_path_factory.mktemp("shared"), memory_dir / "n0", controller.start())
    wait_for(lambda: controller.hellos, "a hello")
    yield controller
    agent.close()
    controller.stop()
    shutil.rmtree(memory_dir, ignore_errors=True)
