"""Signs of life of scripts that report nothing: their output, and the CPU time that they use.

What does not belong here: what counts as a move (`diagnostics.core.activity`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from controller.agent.workers.cpu_time import cpu_time_s
from controller.agent.workers.worker import Worker
from diagnostics.core.activity import Activity, Sign

# A walk through a rank with 8 processes of a data loader and 41 threads took 2.3 ms.
_MIN_PERIOD_S = 1.0
# Of a script that may be silent for ten minutes, more often says nothing.
_MAX_PERIOD_S = 5.0
_PERIODS_PER_LIMIT = 100


@dataclass(slots=True)
class _Watched:
    activity: Activity = field(default_factory=Activity)
    next_s: float = 0.0
    num_moves: int = 0


class SignsOfLife:
    """How often each script has moved."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}

    def num_moves(self, worker: Worker, now_s: float) -> int:
        """How often it has moved since the first call, which may be made as often as one likes.

        A look is taken once in 1 to 5 s, 100 times in the worker's limit.
        """
        assert worker.pid is not None
        watched = self._watched.setdefault(worker.key, _Watched(next_s=now_s))
        if now_s >= watched.next_s:
            watched.next_s = now_s + _period_s(worker.silent_limit_s or 0.0)
            sign = Sign(
                at_s=now_s,
                output_bytes=_output_bytes(worker),
                cpu_s=cpu_time_s(worker.pid, worker.cgroup),
            )
            watched.num_moves = watched.activity.look(sign)
        return watched.num_moves

    def keep_only(self, workers: Iterable[Worker]) -> None:
        """Forget all others."""
        keys = {worker.key for worker in workers}
        for key in [key for key in self._watched if key not in keys]:
            del self._watched[key]


def _period_s(limit_s: float) -> float:
    return min(max(limit_s / _PERIODS_PER_LIMIT, _MIN_PERIOD_S), _MAX_PERIOD_S)


def _output_bytes(worker: Worker) -> int:
    try:
        return worker.paths.log.stat().st_size
    except OSError:
        return 0
