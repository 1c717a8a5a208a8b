"""How fast checkpoints go to storage: sizes of parts, budgets, back-off, and whether it keeps up.

What does not belong here: sending (`upload/transfer.py`), clocks and chance.
"""

from __future__ import annotations

from dataclasses import dataclass

# Large enough to amortise the latency of an object store's request, small enough that one
# part arrives within a call's deadline (60 s) while three others share 2 MB/s with it.
PART_BYTES = 32 << 20
MAX_PARALLEL = 4
# Parts are whole blocks of checksums, and pages of a disk.
_GRAIN_BYTES = 4 << 20
# S3 takes no part under 5 MiB but the last, and no more than 10,000 of them.
_MIN_PART_BYTES = 2 * _GRAIN_BYTES
_MAX_PARTS = 10_000
# The first wait is what a server that restarts needs; the last leaves a few tries within
# the deadline of an upload.
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
# One late upload is chance, two may be a burst of somebody else's traffic; and a job whose
# interval takes seconds loses nothing that is worth an incident.
_LATE_IN_ROW = 3
_LATE_FOR_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """What the uploads of one job may take of a node."""

    memory_bytes: int = MAX_PARALLEL * PART_BYTES
    """Parts on their way at once, in bytes: stores that cannot send from host memory copy them."""
    bytes_per_s: float | None = None
    """On average no more than this; unlimited when None."""

    def part_bytes(self, nbytes: int) -> int:
        """Size of the parts of a file of `nbytes`."""
        wanted = min(PART_BYTES, self.memory_bytes // MAX_PARALLEL)
        if self.bytes_per_s is not None:
            # A burst of a second, so that training sees a trickle rather than a flood.
            wanted = min(wanted, int(self.bytes_per_s))
        needed = -(-nbytes // _MAX_PARTS)
        size = max(_MIN_PART_BYTES, wanted // _GRAIN_BYTES * _GRAIN_BYTES)
        return max(size, -(-needed // _GRAIN_BYTES) * _GRAIN_BYTES)

    def num_parallel(self, nbytes: int) -> int:
        """Parts of such a file that may be on their way at once."""
        size = self.part_bytes(nbytes)
        num_parts = -(-nbytes // size)
        return max(1, min(MAX_PARALLEL, num_parts, self.memory_bytes // size))


DEFAULT_LIMITS = TransferLimits()


class Pace:
    """When bytes may go so that on average no more than `bytes_per_s` do."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def delay_s(self, nbytes: int, now_s: float) -> float:
        """How long the next `nbytes` have to wait; they are counted as sent."""
        if self._bytes_per_s is None:
            return 0.0
        start_s = max(now_s, self._free_at_s)
        self._free_at_s = start_s + nbytes / self._bytes_per_s
        return start_s - now_s


def backoff_s(num_failures: int, jitter: float) -> float:
    """How long to wait after so many failures in a row; `jitter` is in 0..1.

    Half is fixed and half is chance: nodes that failed together do not come back together,
    and none comes back at once.
    """
    limit_s = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(num_failures - 1, 16))
    return limit_s * (1 + jitter) / 2


class Cadence:
    """Whether storage keeps up with the interval that the spec asks for.

    Training asks for an upload when the one before has ended, so one that takes longer
    than the interval shows in the step of the next: it is past the step that was due.
    """

    def __init__(self, interval_steps: int) -> None:
        self._interval_steps = interval_steps
        self._last_step: int | None = None
        self._late_in_row = 0
        self._late_since_s = 0.0

    def is_behind_after(self, step: int, now_s: float) -> bool:
        """Whether, with `step` committed at `now_s`, storage has been too slow for a while."""
        last, self._last_step = self._last_step, step
        # A restart goes back, and says nothing about storage.
        waited = last is not None and step > last + self._interval_steps
        if not waited and step % self._interval_steps == 0:
            self._late_in_row = 0
            return False
        if self._late_in_row == 0:
            self._late_since_s = now_s
        self._late_in_row += 1
        return self._late_in_row >= _LATE_IN_ROW and now_s - self._late_since_s >= _LATE_FOR_S
