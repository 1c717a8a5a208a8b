"""The agent's own files: who runs here, and what it has promised.

`agent.lock` is held for life, so that a second agent on the same folder refuses
to start. `agent.json` names the processes of the agent that ran last; whatever
is left of them is killed before anything new starts. `commands.json` keeps the
command ledger. All are replaced whole, by rename; they are not synced to disk,
since they guard against the death of the agent, not of the machine, which takes
the workers and their memory along.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from controller.agent.core.ledger import CommandLedger
from controller.agent.workers.processes import ProcessName, kill_leftovers, process_name
from outlast import private
from outlast.errors import FatalError

logger = logging.getLogger(__name__)

LEFTOVER_KILL_S = 10.0


class AgentStateError(FatalError):
    """The agent's folders cannot be used."""


def make_private(folder: Path) -> None:
    """Make a folder and those above it, for this user only.

    Below a folder where anybody may make one (/dev/shm, /tmp), names can be guessed: there each
    must be ours, a folder and no link, and the last one closed to others.

    Raises:
        AgentStateError: one belongs to somebody else, or is a link.
        OSError: it cannot be made.
    """
    above = [folder, *folder.parents]
    missing = [path for path in above if not os.path.lexists(path)]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    for index, path in enumerate(above):
        if path.stat().st_mode & stat.S_IWOTH:
            for below in above[:index]:
                _check_own(below)
            if index:
                folder.chmod(0o700)
            return


def _check_own(path: Path) -> None:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        raise AgentStateError(
            f"{path} is {'a link' if stat.S_ISLNK(found.st_mode) else 'no folder'}; anybody may "
            "have made it there: delete it, or use another folder"
        )
    if found.st_uid != os.geteuid():
        raise AgentStateError(
            f"{path} belongs to user {found.st_uid} and not to {os.geteuid()}, as whom this agent "
            "runs: delete it, or use another folder"
        )


class AgentState:
    """The state folder of one agent, locked for the life of this process."""

    def __init__(self, state_dir: Path, memory_dir: Path, data_dir: Path) -> None:
        # Logs and errors of jobs are closed by themselves, whoever made the folder above. There
        # is no umask for all: what agents and workers store elsewhere has the user's.
        jobs_dir = state_dir / "jobs"
        for folder in (state_dir, memory_dir, data_dir, jobs_dir):
            try:
                make_private(folder)
                if folder is jobs_dir and folder.stat().st_uid == os.geteuid():
                    folder.chmod(0o700)
            except OSError as error:
                raise AgentStateError(f"cannot create the folder {folder}: {error}") from error
            if not os.access(folder, os.W_OK | os.X_OK):
                raise AgentStateError(f"cannot write to the folder {folder}")
        self._agent_path = state_dir / "agent.json"
        self._commands_path = state_dir / "commands.json"
        self._lock = os.open(state_dir / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if not isinstance(error, BlockingIOError):
                raise
            raise AgentStateError(
                f"another agent runs on {state_dir}; stop it or use another --state-dir"
            ) from error

    def close(self) -> None:
        """Let the next agent in."""
        # The kernel lets go of it, whatever it says.
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def kill_leftovers(self) -> int:
        """Kill what an earlier agent left running here; how many processes that were."""
        document = self._read(self._agent_path)
        names = [
            ProcessName(pid=int(entry["pid"]), start_ticks=int(entry["start_ticks"]))
            for entry in document.get("processes", [])
        ]
        killed = kill_leftovers(names, timeout_s=LEFTOVER_KILL_S)
        if killed:
            pids = [name.pid for name in killed]
            logger.warning("killed processes of an earlier agent: pids=%s", pids)
        return len(killed)

    def write_agent(self, incarnation: str, rendezvous_port: int, pids: Iterable[int]) -> None:
        """Name this agent and every process below it."""
        own = process_name(os.getpid())
        assert own is not None
        names = [name for pid in pids if (name := process_name(pid)) is not None]
        document = {
            "pid": own.pid,
            "incarnation": incarnation,
            "start_ticks": own.start_ticks,
            "rendezvous_port": rendezvous_port,
            "processes": [{"pid": n.pid, "start_ticks": n.start_ticks} for n in names],
        }
        private.replace_text(self._agent_path, json.dumps(document))

    def predecessor(self) -> str:
        """Incarnation of the agent that ran here last, if it ended in order; "" otherwise."""
        document = self._read(self._agent_path)
        return str(document.get("incarnation", "")) if document.get("left") else ""

    def note_left(self) -> None:
        """This agent ends in order, and its workers have ended: word for the next one here.

        The controller may have gone first.
        """
        try:
            left = {**self._read(self._agent_path), "left": True, "processes": []}
            private.replace_text(self._agent_path, json.dumps(left))
        except OSError as error:
            logger.error("an orderly end is not on record, and will count as a fault: %s", error)

    def load_ledger(self) -> CommandLedger:
        """The commands of earlier agents on this node; empty when there were none."""
        document = self._read(self._commands_path)
        if not document:
            return CommandLedger()
        try:
            return CommandLedger.from_json(document)
        except ValueError as error:
            # Attempts only grow, so an empty ledger can at worst answer a command twice.
            logger.warning("commands of earlier agents are lost: %s", error)
            return CommandLedger()

    def save_ledger(self, ledger: CommandLedger) -> None:
        """Keep the ledger; call before what it admits is done."""
        private.replace_text(self._commands_path, json.dumps(ledger.to_json()))

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            document = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            logger.warning("unreadable file %s: %s", path, error)
            return {}
        return document if isinstance(document, dict) else {}
