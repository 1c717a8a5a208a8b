"""A share of a core for each rank, so that one that waits leaves the others no more of it.

Ranks of a cluster have a device each. Eight ranks on two cores would take over what a
bubble leaves, and no schedule would be better than another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/cpu")
_V2 = Path("/sys/fs/cgroup")
# Short beside a pass, so that a rank does not stand still for long at once.
_PERIOD_US = 5000


@contextmanager
def groups(count: int, share: float) -> Iterator[list[Path]]:
    """Control groups whose processes have `share` of a core each.

    Raises:
        SystemExit: this machine does not let the caller make any, with why.
    """
    is_v2 = (_V2 / "cgroup.controllers").exists()
    made: list[Path] = []
    try:
        if is_v2:
            # Groups below the root have a limit only once it is handed down.
            (_V2 / "cgroup.subtree_control").write_text("+cpu")
        for number in range(count):
            folder = (_V2 if is_v2 else _V1) / f"outlast-bench-{os.getpid()}-{number}"
            folder.mkdir()
            made.append(folder)
            quota_us = round(share * _PERIOD_US)
            if is_v2:
                (folder / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
    except OSError as error:
        _remove(made)
        raise SystemExit(
            f"cannot give ranks a share of a core each ({error}): run this as root, on Linux, "
            f"where {_V1} or {_V2} can be written to"
        ) from error
    try:
        yield made
    finally:
        _remove(made)


def _remove(made: list[Path]) -> None:
    for folder in made:
        # One whose processes are still ending is left to the system.
        with suppress(OSError):
            folder.rmdir()


def enter(folder: Path) -> None:
    """Take this process, all its threads, into a group."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
