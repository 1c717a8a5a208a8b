"""Local nodes: found again after a crash, dead for good when dead, never orphaned."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

import pytest

from controller.local.cluster import LocalCluster, LocalConfig
from controller.local.processes import members_of
from outlast.ids import NodeId
from tests.controller.fakes import until
from tests.controller.processes import Controller, controller, is_alive, node_pids, wait_for

STANDIN = f"{sys.executable} -S {Path(__file__).with_name('node_standin.py')}"


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for pid in members_of(list(node_pids(tmp_path).values())):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(memory_dir(tmp_path), ignore_errors=True)


def memory_dir(state_dir: Path) -> Path:
    config = LocalConfig(
        state_dir=state_dir, nodes=1, workers_per_node=1, controller_address="unused"
    )
    return config.memory_dir


def up(state_dir: Path) -> AbstractContextManager[Controller]:
    """A controller with two nodes that stand in for agents."""
    return controller(state_dir, "--local-nodes", "1", "--standby", "1", "--agent-command", STANDIN)


@asynccontextmanager
async def cluster_of(state_dir: Path, nodes: int = 2) -> AsyncIterator[Cluster]:
    """A cluster whose controller is "killed" by leaving the block: its nodes stay."""
    it = Cluster(state_dir, nodes)
    try:
        yield it
    finally:
        await it.it.leave()


class Cluster:
    """A local cluster in this process, and the deaths that it told."""

    def __init__(self, state_dir: Path, nodes: int) -> None:
        self.gone: list[str] = []
        config = LocalConfig(
            state_dir=state_dir,
            nodes=nodes,
            workers_per_node=1,
            controller_address="127.0.0.1:1",
            agent_command=tuple(STANDIN.split()),
        )
        self.details: list[str] = []
        self.it = LocalCluster(config, self._died)

    def _died(self, node: NodeId, detail: str, at_s: float) -> None:
        self.gone.append(node)
        self.details.append(detail)


def children(state_dir: Path, count: int) -> list[int]:
    """Pids of the nodes' workers, once there are so many."""
    files = [state_dir / "nodes" / f"node-{number}" / "child" for number in range(count)]
    wait_for(lambda: all(f.exists() and f.read_text() for f in files), "nodes are up")
    return [int(file.read_text()) for file in files]


def test_ctrl_c_ends_everything_and_keeps_host_memory(state_dir: Path) -> None:
    with up(state_dir) as it:
        workers = children(state_dir, 2)
        agents = list(node_pids(state_dir).values())
        code, took_s = it.stop(signal.SIGINT)
        assert code == 0
        # Seconds, on a machine that is busy with other tests.
        assert took_s < 10
        assert not any(map(is_alive, workers + agents))
        assert members_of(agents) == []
        assert not (state_dir / "controller.json").exists()
        assert node_pids(state_dir) == {}
        slot = memory_dir(state_dir) / "node-0" / "slot"
        assert slot.exists()
        inode = slot.stat().st_mtime_ns
        it.start()
        wait_for(lambda: slot.stat().st_mtime_ns > inode, "the node is back with its memory")


def test_killed_controller_adopts_its_nodes_and_finds_the_dead(state_dir: Path) -> None:
    with up(state_dir) as it:
        workers = children(state_dir, 2)
        before = node_pids(state_dir)
        it.kill()
        assert all(map(is_alive, [*workers, *before.values()])), "nodes outlive the controller"
        # One more dies while nobody looks: the machine is gone, its worker with it.
        os.kill(before["node-1"], signal.SIGKILL)
        wait_for(lambda: not is_alive(before["node-1"]), "the agent is dead")
        it.start()
        wait_for(lambda: not is_alive(workers[1]), "what ran on the dead node is gone")
        assert node_pids(state_dir) == before, "no second agent for any node"
        assert is_alive(before["node-0"])
        assert is_alive(workers[0])
        wait_for(lambda: not (memory_dir(state_dir) / "node-1").exists(), "its memory is lost")
        it.stop()
        assert not is_alive(workers[0])


def test_dead_agent_takes_its_whole_node_along(state_dir: Path) -> None:
    async def scenario() -> None:
        async with cluster_of(state_dir) as cluster:
            await cluster.it.start()
            workers = children(state_dir, 2)
            os.kill(node_pids(state_dir)["node-0"], signal.SIGKILL)
            await until(lambda: cluster.gone == ["node-0"], "the death is told")
            await until(lambda: not is_alive(workers[0]), "the node's worker is gone")
            memory = memory_dir(state_dir) / "node-0"
            await until(lambda: not memory.exists(), "its memory is lost")
            assert is_alive(workers[1])
            cluster.it.evict(NodeId("node-1"), "given up")
            await until(lambda: not is_alive(workers[1]), "an evicted node ends")

    asyncio.run(scenario())


def test_a_death_that_was_told_is_not_news_to_the_next_controller(state_dir: Path) -> None:
    async def scenario() -> None:
        async with cluster_of(state_dir) as cluster:
            await cluster.it.start()
            children(state_dir, 2)
            os.kill(node_pids(state_dir)["node-0"], signal.SIGKILL)
            await until(lambda: cluster.gone == ["node-0"], "the death is told")
            (told,) = cluster.details
            assert told.startswith("its agent is gone: killed by SIGKILL; ")
            assert "`outlast up` brings it back" in told
            memory = memory_dir(state_dir) / "node-0"
            await until(lambda: not memory.exists(), "its memory is lost")
        async with cluster_of(state_dir) as again:
            await again.it.start()
            assert (again.it.adopted, again.it.dead) == (1, ("node-0",))
            assert again.details == [told]
            await again.it.stop_all()

    asyncio.run(scenario())


def test_next_run_starts_every_node_when_none_is_left(state_dir: Path) -> None:
    async def scenario() -> None:
        async with cluster_of(state_dir) as cluster:
            await cluster.it.start()
            workers = children(state_dir, 2)
            before = node_pids(state_dir)
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not any(map(is_alive, before.values())), "agents are dead")
        async with cluster_of(state_dir) as cluster:
            await cluster.it.start()
            assert not any(map(is_alive, workers)), "what was left over is gone"
            after = node_pids(state_dir)
            assert after.keys() == before.keys()
            assert not set(after.values()) & set(before.values())
            assert cluster.gone == []
            await cluster.it.stop_all()

    asyncio.run(scenario())


def test_agent_whose_pid_was_never_written_is_found(state_dir: Path) -> None:
    async def scenario() -> None:
        async with cluster_of(state_dir) as cluster:
            await cluster.it.start()
            children(state_dir, 2)
            before = node_pids(state_dir)
        (state_dir / "nodes" / "node-0" / "process.json").unlink()
        async with cluster_of(state_dir) as cluster:
            await cluster.it.start()
            assert node_pids(state_dir) == before

    asyncio.run(scenario())


def test_fewer_nodes_adopt_those_that_still_run(state_dir: Path) -> None:
    async def scenario() -> None:
        async with cluster_of(state_dir, 2) as cluster:
            await cluster.it.start()
            workers = children(state_dir, 2)
        async with cluster_of(state_dir, 1) as cluster:
            await cluster.it.start()
            await cluster.it.stop_all()
            assert not any(map(is_alive, workers))

    asyncio.run(scenario())


def test_fresh_forgets_nodes_and_host_memory(state_dir: Path) -> None:
    async def scenario() -> None:
        async with cluster_of(state_dir) as cluster:
            await cluster.it.start()
            workers = children(state_dir, 2)
        async with cluster_of(state_dir) as cluster:
            await cluster.it.forget_everything()
            assert not any(map(is_alive, workers))
            assert not memory_dir(state_dir).exists()
            assert not (state_dir / "nodes").exists()

    asyncio.run(scenario())
