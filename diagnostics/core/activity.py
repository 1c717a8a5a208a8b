"""Whether a process that reports nothing shows any sign of life.

A user's own script need not report its steps. It has moved when its output has grown, or when it
and its descendants have used more CPU time since its last move than a waiting program uses.

A waiting program uses some. A rank that stood in a gloo all-reduce beside eight idle processes of
a data loader and four threads that poll every 0.1 to 1 s, as NCCL's watchdog does, used 0.4 % of
a CPU.

This sign misses one thing and may be wrong about another:

- A rank that spins uses a whole CPU, as one that waits for a GPU in a collective usually does
  (CUDA spins by default). It moves for ever, whatever it waits for. Its hang is not found here;
  what could show it is NCCL's flight recorder.
- A rank that works with less than 2 % of a CPU and without a line of output, such as a slow
  download, does not move.

So the sign says that a rank *may* hang, after a limit of minutes, and which of several silent
ranks the others wait for it does not say.

What does not belong here: reading /proc (`controller.agent.workers.cpu_time`), and for how long
a process may stay silent (`pace`).
"""

from __future__ import annotations

from dataclasses import dataclass

# Five times what the waiting rank above used, so that more threads that poll are no sign of life.
# A rank that loads data, compiles or launches kernels uses ten times this.
IDLE_SHARE = 0.02
# Five ticks of /proc: in a short time one tick more would be a large share.
IDLE_S = 0.05
# A look that comes later than this after the last one: the observer was away (a paused machine),
# and what it watches may have been away with it. Twice the longest time between looks.
MAX_GAP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What one look at a process finds. `at_s` is of the observer's monotonic clock."""

    at_s: float
    output_bytes: int
    # Of the process and its descendants, since each began; None where it cannot be read.
    cpu_s: float | None


class Activity:
    """Counts the moves of one process."""

    def __init__(self) -> None:
        self._last: Sign | None = None
        # CPU time when it last moved, and the time since then in which it was looked at.
        self._moved_cpu_s = 0.0
        self._idle_s = 0.0
        self._num_moves = 0

    def look(self, sign: Sign) -> int:
        """Take in a look; how often the process has moved since the first one."""
        last, self._last = self._last, sign
        if last is None:
            self._moved_cpu_s = sign.cpu_s or 0.0
            return self._num_moves
        self._idle_s += min(max(0.0, sign.at_s - last.at_s), MAX_GAP_S)
        if sign.cpu_s is not None:
            # The time of a child that nobody has waited for goes with it.
            self._moved_cpu_s = min(self._moved_cpu_s, sign.cpu_s)
        if self._has_moved(last, sign):
            self._num_moves += 1
            self._idle_s = 0.0
            self._moved_cpu_s = self._moved_cpu_s if sign.cpu_s is None else sign.cpu_s
        return self._num_moves

    def _has_moved(self, last: Sign, sign: Sign) -> bool:
        # Its log may have been cut meanwhile.
        if sign.output_bytes > last.output_bytes:
            return True
        # What cannot be read is no silence.
        if sign.cpu_s is None:
            return True
        return sign.cpu_s - self._moved_cpu_s > IDLE_S + IDLE_SHARE * self._idle_s
