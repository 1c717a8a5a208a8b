"""A cgroup of its own for each worker, where the kernel and this node's administrator permit.

What a worker starts is born in its cgroup and cannot leave it by a new session or a double fork,
so `cgroup.kill` ends all of it at once. That takes cgroup v2 with `cgroup.kill` (Linux 5.14) and
the right to make groups below the agent's own: as root outside containers, or where the subtree is
delegated (`Delegate=yes` of systemd). Otherwise a worker's process group is killed and what has
left that is found as an orphan (`orphans`); both are done here, too, and find nothing then.

No controller is enabled below the agent's own group, so memory, and kills for want of it, stay
counted there (`oom`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
from pathlib import Path

from controller.agent.workers.cgroup_paths import folder_of, groups_of

logger = logging.getLogger(__name__)

_EMPTY_PAUSE_S = 0.01
# A killed process leaves within milliseconds, unless it is stuck in the kernel.
_EMPTY_TRIES = 200


class WorkerCgroups:
    """The cgroups that this agent makes; none where it may not."""

    def __init__(self, state_dir: Path, *, is_wanted: bool = True, root: Path = Path("/")) -> None:
        """`state_dir` names the agent among others below the same cgroup."""
        digest = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:12]
        self._prefix = f"outlast-{digest}-"
        self._numbers = itertools.count(1)
        self._above: Path | None = None
        self.why_not = self._find(root) if is_wanted else "none, as the agent is to make none"
        if self._above is not None:
            self._end_leftovers()
        logger.info(
            "cgroups of workers: %s", self.why_not or f"below {self._above}, ended by cgroup.kill"
        )

    def make(self) -> Path | None:
        """A new group for a worker; None where there can be none."""
        if self._above is None:
            return None
        for number in self._numbers:
            group = self._above / f"{self._prefix}{number}"
            try:
                group.mkdir()
            except FileExistsError:
                # Of an agent before this one: what was killed there has not left it yet.
                continue
            except OSError as error:
                # Too many groups, or the right was taken away: the worker runs without.
                logger.warning("a worker has no cgroup: %s", error)
                return None
            return group
        return None

    async def end(self, group: Path) -> None:
        """Kill whatever is in a group and remove it; what hangs in the kernel keeps it."""
        for attempt in range(_EMPTY_TRIES):
            if attempt:
                await asyncio.sleep(_EMPTY_PAUSE_S)
            if kill_and_remove(group):
                return
        logger.warning("processes stay in %s after cgroup.kill", group)

    def close(self) -> None:
        """Remove what can be removed; the rest is ended by the next agent here."""
        self._end_leftovers()

    def _find(self, root: Path) -> str:
        """Look where groups can be made; why they cannot, or ""."""
        where = folder_of(root, groups_of(root, "self"), "cgroup2")
        if where is None:
            return "none, as cgroup v2 is not mounted"
        probe = where.folder / f"{self._prefix}0"
        try:
            probe.mkdir(exist_ok=True)
        except OSError as error:
            return f"none, as {where.folder} cannot be written to ({error.strerror})"
        # These files come with the folder.
        needed = ("cgroup.kill", "cgroup.procs")
        lacks = next((name for name in needed if not os.access(probe / name, os.W_OK)), None)
        with contextlib.suppress(OSError):
            probe.rmdir()
        if lacks is not None:
            return f"none, as groups below {where.folder} have no {lacks} that may be written to"
        self._above = where.folder
        return ""

    def _end_leftovers(self) -> None:
        """End groups of this agent, or of the one before it on the same state folder."""
        if self._above is None:
            return
        try:
            for group in self._above.glob(f"{self._prefix}*"):
                kill_and_remove(group)
        except OSError as error:
            logger.warning("cgroups of earlier workers stay in %s: %s", self._above, error)


def kill_and_remove(group: Path) -> bool:
    """Kill what is in a group; whether it is empty by now, and gone."""
    try:
        (group / "cgroup.kill").write_text("1")
        # A worker may have made groups of its own; the innermost go first.
        for folder in sorted(group.glob("**/"), reverse=True):
            folder.rmdir()
    except FileNotFoundError:
        # A group below it may have been removed by the worker that made it.
        return not os.path.lexists(group)
    except OSError:
        return False
    return True
