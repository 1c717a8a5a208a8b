"""What one rank of this benchmark does: `python -m bench.checkpoint.rank TASK ARGUMENTS`.

Ranks are not pinned: what saves in the background may take whatever core is free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.checkpoint import memory, restoring, saving
from bench.member import serve

TASKS: Mapping[str, Callable[..., Any]] = {
    "saving": saving.run,
    "memory": memory.run,
    "store": restoring.store,
    "restore": restoring.restore_all,
}

if __name__ == "__main__":
    serve(TASKS, pinned=False)
