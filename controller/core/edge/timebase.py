"""The time in which the machine lives: steady, and never far from the wall clock for long.

Deadlines are moments, so a step of the wall clock would end all of them at once or put them
off for as long as it was. This time follows the monotonic clock and gives way to the wall
clock slowly: by at most a tenth of what passes. A step is noted once.
"""

from __future__ import annotations

from dataclasses import dataclass

# Deadlines of minutes stay deadlines of minutes; a step of an hour is made up for in ten.
SLEW = 0.1
# What NTP corrects at once, and what a pause between reading two clocks makes.
STEP_S = 2.0


@dataclass(slots=True)
class TimeBase:
    """Seconds since the Unix epoch, from readings of a wall clock and a monotonic one."""

    wall_s: float
    monotonic_s: float
    now_s: float = 0.0
    num_steps: int = 0
    # Of the last step, forwards when positive.
    last_step_s: float = 0.0

    def __post_init__(self) -> None:
        self.now_s = self.wall_s

    @property
    def offset_s(self) -> float:
        """How far the wall clock is ahead."""
        return self.wall_s - self.now_s

    def advance(self, wall_s: float, monotonic_s: float) -> float:
        """The time at new readings of both clocks; never less than before."""
        passed_s = max(0.0, monotonic_s - self.monotonic_s)
        step_s = wall_s - self.wall_s - passed_s
        if abs(step_s) > STEP_S:
            self.num_steps += 1
            self.last_step_s = step_s
        self.wall_s = wall_s
        self.monotonic_s = max(self.monotonic_s, monotonic_s)
        steady_s = self.now_s + passed_s
        most_s = SLEW * passed_s
        self.now_s = steady_s + min(max(wall_s - steady_s, -most_s), most_s)
        return self.now_s
