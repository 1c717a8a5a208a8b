"""How processes of tests, several times as many as there are cores, share these."""

from __future__ import annotations

import ctypes
import os

_PR_SET_THP_DISABLE = 41


def share_cores() -> None:
    """Have this process, and those that it starts from now on, scheduled in batches.

    Gloo's thread polls while its rank's own thread holds the lock of a connection; a rank whose
    thread loses its core to a message that has just arrived leaves it polling. With eight ranks on
    two cores that was a third of all CPU time; of nine rows of `tests.chaos`, three at once, it
    was a seventh.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def allow_huge_pages(is_allowed: bool) -> None:
    """Set it for this process and those that it starts from now on.

    Gathering the imports of a standby process in huge pages takes 0.3 s of a core and saves 5 ms
    of each fork. Those of tests fork a few ranks and end.
    """
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, int(not is_allowed), 0, 0, 0)
