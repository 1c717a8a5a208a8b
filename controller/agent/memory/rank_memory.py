"""Host memory of ranks that a node does not have any more.

A job that goes on with fewer or more replicas, or a node that comes back into another place, may
leave a node with other ranks than it had. Their slots would never be looked at again, and take
the room of those to come. So they go; but where a new rank has nothing here, one of them is left
to it: a replica holds the same state under any rank, and a restore takes nothing that does not
fit.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from checkpoint.core import names
from outlast.worker_contract import ALL_RANKS


def stray_folders(memory_dir: Path, ranks: Sequence[int]) -> list[Path]:
    """Folders of ranks other than these in a job's host memory, in rank order."""
    wanted = {names.memory_folder(rank) for rank in ranks}
    return sorted(path for path in memory_dir.glob(ALL_RANKS) if path.name not in wanted)


def hand_over(memory_dir: Path, ranks: Sequence[int]) -> None:
    """Leave what strays to ranks that have nothing, and free the rest. Nobody may use it now."""
    strays = stray_folders(memory_dir, ranks)
    for rank in ranks:
        folder = memory_dir / names.memory_folder(rank)
        if strays and not folder.exists():
            strays.pop(0).rename(folder)
    for stray in strays:
        shutil.rmtree(stray, ignore_errors=True)


def free_copies(memory_dir: Path) -> None:
    """Free the copies of other nodes' ranks. Nobody may bring any now."""
    shutil.rmtree(memory_dir / names.REPLICAS, ignore_errors=True)
