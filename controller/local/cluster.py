"""Local "nodes": process groups on this machine that stand for machines.

Each node is an agent in a session of its own, so that everything it starts can
be found and ended. Agents outlive the controller: one that was killed and comes
back adopts those that still run, and never starts a second one for a node.

A node whose agent has ended is a machine that died: it stays dead, and its host
memory is lost. Only a fresh start, when no agent of the state directory runs
any more, brings all nodes back; what they held in host memory before an orderly
stop is still there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from controller.agent.workers.processes import (
    ProcessName,
    how_ended,
    process_name,
    wait_gone,
    zombie_status,
)
from controller.failure import Failure
from controller.local.processes import (
    kill,
    kill_sessions,
    marked_with,
    members_of,
    session_of,
    terminate,
    wait_all_gone,
)
from outlast import private
from outlast.ids import NodeId
from outlast.startup import python_command

logger = logging.getLogger(__name__)

# Marks every process of a node, so that one whose pid file was never written is found.
NODE_MARK = "OUTLAST_LOCAL_NODE"
SHARED_MEMORY = Path("/dev/shm")
# An agent needs up to two seconds for each of its parts when it is stopped.
STOP_TIMEOUT_S = 6.0
KILL_TIMEOUT_S = 5.0
_LOG_TAIL_BYTES = 2_000

# Nodes whose agents still run keep a dead one from being started again.
_REMEDY = "; `outlast up` brings it back once it is stopped with Ctrl-C and started again"

GoneCallback = Callable[[NodeId, str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """The nodes to run here."""

    state_dir: Path
    nodes: int
    """How many, standbys included."""
    workers_per_node: int
    controller_address: str
    """Where agents connect first; later they read controller.json."""
    join_token_file: Path | None = None
    """What agents show the controller."""
    tls_dir: Path | None = None
    """Where they find the authority that signed the controller's certificate."""
    agent_command: tuple[str, ...] = python_command("controller.agent")
    memory_root: Path = SHARED_MEMORY
    can_come_back: bool = True
    """Whether a later start of the controller on the same state brings dead nodes back."""

    @property
    def memory_dir(self) -> Path:
        """Host memory of all nodes of this state directory."""
        digest = hashlib.sha256(str(self.state_dir.resolve()).encode()).hexdigest()
        return self.memory_root / f"outlast-{digest[:8]}"


@dataclass(slots=True)
class _Node:
    name: NodeId
    process: ProcessName | None = None
    # Ours to reap, unless an earlier controller started it.
    child: subprocess.Popen[bytes] | None = None
    watcher: asyncio.Task[None] | None = field(default=None)

    @property
    def is_alive(self) -> bool:
        """Whether the agent's process runs. A dead one that nobody reaped does not."""
        process = self.process
        if process is None or zombie_status(process.pid) is not None:
            return False
        return process_name(process.pid) == process


class LocalCluster:
    """Starts, adopts, watches and ends the nodes of one state directory."""

    def __init__(self, config: LocalConfig, on_gone: GoneCallback) -> None:
        self._config = config
        self._on_gone = on_gone
        self._nodes = [_Node(NodeId(f"node-{number}")) for number in range(config.nodes)]
        self._stopping = False
        # As `start` found them: agents that run on, and nodes that are not brought back.
        self.adopted = 0
        self.dead: tuple[NodeId, ...] = ()
        self._failure = Failure()

    @property
    def sessions(self) -> list[int]:
        """Session ids of the nodes, alive or not."""
        return [node.process.pid for node in self._nodes if node.process is not None]

    async def start(self) -> None:
        """Bring every node up: adopt what runs, start what does not, report what died."""
        self._nodes += [_Node(name) for name in self._left_over()]
        for node in self._nodes:
            node.process = self._find(node.name)
        if any(node.is_alive for node in self._nodes):
            dead = [node for node in self._nodes if node.process and not node.is_alive]
            self.adopted = sum(node.is_alive for node in self._nodes)
            self.dead = tuple(node.name for node in dead)
        else:
            # Nobody is left of the last run: this one starts afresh.
            dead = []
            for node in self._nodes:
                await self._clear(node)
        for node in self._nodes:
            if node.is_alive:
                logger.info("local node adopted: node=%s pid=%d", node.name, _pid(node))
                self._watch(node)
            elif node in dead:
                await self._find_dead(node)
            else:
                self._spawn(node)

    async def failed(self) -> None:
        """Raise what ended the watch over a node, once that has happened."""
        await self._failure.raised()

    async def stop_all(self) -> None:
        """End every node within seconds, and everything that runs on it."""
        self._stopping = True
        for node in self._nodes:
            if node.is_alive:
                terminate(_pid(node))
        alive = [_pid(node) for node in self._nodes if node.is_alive]
        await wait_all_gone(alive, timeout_s=STOP_TIMEOUT_S)
        left = await kill_sessions(self.sessions, timeout_s=KILL_TIMEOUT_S)
        if left:
            logger.error("processes outlived SIGKILL: pids=%s", left)
        for node in self._nodes:
            if node.child is not None and not left:
                node.child.wait()
            if not node.is_alive:
                self._pid_file(node.name).unlink(missing_ok=True)
        await self.leave()

    async def leave(self) -> None:
        """Let the nodes run on without us, for a controller that fails and will come back."""
        watchers = [node.watcher for node in self._nodes if node.watcher is not None]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        for node in self._nodes:
            if node.child is not None and node.child.poll() is None:
                # Popen has no other way to learn that nobody will wait.
                node.child.returncode = 0
            node.child = None

    def provision(self, count: int, workers: int, reason: str) -> None:
        """A laptop does not grow: say so, and what can be done."""
        logger.warning(
            "nodes wanted and none can be added here: count=%d workers=%d %s; "
            "`outlast up --nodes N --standby N` starts more",
            count,
            workers,
            reason,
        )

    def evict(self, node: NodeId, reason: str) -> None:
        """End everything that runs on a node."""
        for known in self._nodes:
            if known.name == node and known.process is not None:
                logger.info("local node ended: node=%s %s", node, reason)
                # Its watcher sees the agent go and does the rest.
                if known.is_alive:
                    kill(_pid(known))

    async def forget_everything(self) -> None:
        """End whatever still runs on any node, and drop all that nodes keep."""
        await self.end_left_over()
        shutil.rmtree(self._config.state_dir / "nodes", ignore_errors=True)
        self.forget_memory()

    async def end_left_over(self) -> None:
        """Stop all that still runs on local nodes, those that an earlier controller started too."""
        found = [self._find(name) for name in self._names_on_disk()]
        sessions = [process.pid for process in found if process is not None]
        await kill_sessions(sessions, timeout_s=KILL_TIMEOUT_S)

    def forget_memory(self) -> None:
        """Drop what nodes hold in host memory; none runs."""
        shutil.rmtree(self._config.memory_dir, ignore_errors=True)

    def _left_over(self) -> list[NodeId]:
        """Nodes of an earlier start with more of them, whose agents still run."""
        known = [node.name for node in self._nodes]
        names = [name for name in self._names_on_disk() if name not in known]
        return [name for name in names if _Node(name, process=self._find(name)).is_alive]

    def _names_on_disk(self) -> list[NodeId]:
        folder = self._config.state_dir / "nodes"
        return sorted(NodeId(path.name) for path in folder.iterdir()) if folder.is_dir() else []

    def _find(self, name: NodeId) -> ProcessName | None:
        """The agent that was started for a node last, alive or not; None when there is none."""
        try:
            document = json.loads(self._pid_file(name).read_text())
            return ProcessName(pid=document["pid"], start_ticks=document["start_ticks"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        # A controller that died between starting an agent and noting it.
        for pid in marked_with(NODE_MARK, str(self._folder(name))):
            found = process_name(pid)
            if session_of(pid) == pid and found is not None:
                self._note(name, found)
                return found
        return None

    def _death_of(self, name: NodeId) -> str:
        """What an earlier controller said of the death of a node's agent; "" if it said nothing."""
        try:
            return str(json.loads(self._pid_file(name).read_text()).get("death", ""))
        except (OSError, ValueError, AttributeError):
            return ""

    async def _clear(self, node: _Node) -> None:
        """Make room for a new agent: whatever the dead one left behind ends."""
        if node.process is not None and members_of([node.process.pid]):
            await kill_sessions([node.process.pid], timeout_s=KILL_TIMEOUT_S)
        node.process = None
        self._pid_file(node.name).unlink(missing_ok=True)

    def _spawn(self, node: _Node) -> None:
        config = self._config
        folder = self._folder(node.name)
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            *config.agent_command,
            *("--node", node.name),
            *("--controller", config.controller_address),
            *("--controller-file", str(config.state_dir / "controller.json")),
            *("--state-dir", str(folder)),
            *("--memory-dir", str(config.memory_dir / node.name)),
            *("--data-dir", str(config.state_dir / "data")),
            *("--workers", str(config.workers_per_node)),
            *("--metrics-port", "0"),
        ]
        if config.join_token_file is not None:
            command += ["--join-token-file", str(config.join_token_file)]
        if config.tls_dir is not None:
            command += ["--tls-dir", str(config.tls_dir.resolve())]
        with private.open_to_append(folder / "agent.log") as log:
            node.child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # NCCL lets ranks share a GPU only where they are on different hosts.
                env={"NCCL_HOSTID": node.name, **os.environ, NODE_MARK: str(folder)},
            )
        node.process = process_name(node.child.pid)
        assert node.process is not None, "a child that nobody has waited for has a name"
        self._note(node.name, node.process)
        logger.info("local node started: node=%s pid=%d", node.name, node.child.pid)
        self._watch(node)

    def _watch(self, node: _Node) -> None:
        node.watcher = asyncio.create_task(self._wait(node), name=f"watch-{node.name}")
        node.watcher.add_done_callback(self._failure.note_end)

    async def _wait(self, node: _Node) -> None:
        """The cluster's word on a node: its agent's process has ended."""
        await wait_gone(_pid(node))
        if self._stopping:
            return
        code = None if node.child is None else node.child.wait()
        how = "it ended" if code is None else how_ended(code)
        await self._died(node, f"its agent is gone: {how}{self._remedy}")

    async def _find_dead(self, node: _Node) -> None:
        """Its death is news only if no earlier controller was there to tell it."""
        death = self._death_of(node.name)
        if death:
            logger.info("local node is still dead: node=%s %s", node.name, death)
            self._on_gone(node.name, death, time.time())
        else:
            await self._died(node, f"its agent ended while the controller was away{self._remedy}")

    async def _died(self, node: _Node, detail: str) -> None:
        assert node.process is not None
        tail = _tail(self._folder(node.name) / "agent.log")
        logger.warning("local node died: node=%s %s; its log ends:\n%s", node.name, detail, tail)
        self._on_gone(node.name, detail, time.time())
        self._note(node.name, node.process, death=detail)
        # A dead machine runs nothing and remembers nothing.
        await kill_sessions([node.process.pid], timeout_s=KILL_TIMEOUT_S)
        shutil.rmtree(self._config.memory_dir / node.name, ignore_errors=True)

    @property
    def _remedy(self) -> str:
        return _REMEDY if self._config.can_come_back else ""

    def _folder(self, name: NodeId) -> Path:
        return self._config.state_dir.resolve() / "nodes" / name

    def _pid_file(self, name: NodeId) -> Path:
        return self._folder(name) / "process.json"

    def _note(self, name: NodeId, process: ProcessName, death: str = "") -> None:
        document = {"pid": process.pid, "start_ticks": process.start_ticks, "death": death}
        draft = self._pid_file(name).with_suffix(".tmp")
        private.write_text(draft, json.dumps(document))
        draft.replace(self._pid_file(name))


async def end_nodes(state_dir: Path) -> None:
    """End what a controller that is gone has left of its local nodes; logs stay."""
    config = LocalConfig(state_dir=state_dir, nodes=0, workers_per_node=1, controller_address="")
    cluster = LocalCluster(config, lambda *_: None)
    await cluster.end_left_over()
    cluster.forget_memory()


def _pid(node: _Node) -> int:
    assert node.process is not None
    return node.process.pid


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
