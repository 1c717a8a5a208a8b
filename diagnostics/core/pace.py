"""How long a rank may stand still: learned from how long its phases have taken.

A rank moves when anything in its black box changes: its step, its phase, the
operation that it is in. It stands when nothing does. A step of milliseconds
and one of minutes hang after very different times, and so do a forward pass, an
evaluation and a checkpoint, so each phase has a limit of its own: some multiple
of the longest that it took of late; a start up to the forming of groups is held against
those of earlier attempts. A phase that has not been seen yet has none, nor have the first steps
of an attempt, which may find kernels compiled one time and compile them the next, nor
a restore, which may come from memory one time and from storage the next: the job's own
`recovery.hang_timeout_s` and `recovery.first_step_timeout_s` hold for them.

A script that reports no steps moves when it shows a sign of life (`activity`); nothing is
learned of it, and `recovery.hang_timeout_s` is its limit for silence.

A script that reports its steps and does not name what it does in them may evaluate for minutes
without a word. So its limit is wide, and it stands only while it shows no sign of life, either.

A process that was stopped by a signal does not go on by itself, so nothing need be
known of it.

Two things stand still without being at fault, and their time does not count:
an observer that was stopped itself (a paused machine), and a rank that wants a
CPU and gets none.

One standing rank proves nothing, since it may wait for a slow one. A job hangs
when *all* of its ranks stand for longer than each one's limit.

What does not belong here: who is at fault (`hang`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from outlast.blackbox import Phase

# Of the longest pass: two equally long steps in a row would be a coincidence, three are not.
USUAL_FACTOR = 3.0
# A page fault storm, a garbage collection or a neighbour's burst may cost a second. What one
# look finds may be the end of two passes, which is why the floor is not higher.
USUAL_FLOOR_S = 1.25
# A phase that was seen this often is known; with fewer passes the longest may be yet to come
# (an evaluation whose second run finds cold files, a checkpoint behind an upload).
KNOWN_PASSES = 8
EARLY_FACTOR = 10.0
EARLY_FLOOR_S = 10.0
# A script's step of which it names nothing may have an evaluation in it, or a checkpoint that is
# written to a slow disk, which are no part of the steps before.
UNNAMED_FACTOR = 10.0
UNNAMED_FLOOR_S = 60.0
# Compilation, autotuning and first-touch memory end within these steps of an attempt.
WARM_UP_STEPS = 3
# The longest pass is forgotten after so many, so that one outlier does not blind us for good.
WINDOW = 64
# A look that comes later than this after the last one means that the observer was away.
MAX_GAP_S = 0.6
# A process may be stopped by a signal for so long: someone may have stopped it in passing.
STOPPED_S = 3.0
# As /proc shows it; a debugger's stop is another state, and a stack dump is one.
STOPPED_STATE = "T"

# Passed once in an attempt, before its first step.
_OF_STARTS = (Phase.STARTING, Phase.GROUPS)
_UNLEARNABLE = (Phase.RESTORE, Phase.FINISHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look at a rank finds. Times are of the observer's monotonic clock."""

    at_s: float
    # Whatever changes when the rank moves.
    place: tuple[int, ...]
    phase: Phase
    # By this attempt.
    num_steps: int
    # Time spent so far in each phase that has ended.
    phases_s: Mapping[Phase, float]
    # Time so far in which it waited for a CPU.
    starved_s: float = 0.0
    # By a signal.
    is_stopped: bool = False
    # Of a script that has reported no step and no operation: for how long it may be silent.
    silent_limit_s: float | None = None
    # How often it has shown a sign of life; of a script in a step of which it names nothing.
    num_moves: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """How long a rank has stood still, against its limit."""

    stalled_s: float
    # None while the phase's length is not known.
    limit_s: float | None
    # Where the limit comes from, in words.
    source: str
    # For how long its black box has not changed, whatever signs of life it shows.
    unchanged_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it stands for longer than it should."""
        return self.limit_s is not None and self.stalled_s > self.limit_s


class Pace:
    """One rank's looks, and what they have taught."""

    def __init__(self) -> None:
        self._passes: dict[Phase, deque[float]] = {}
        self._last: Look | None = None
        self._stalled_s = 0.0
        # The same without a sign of life.
        self._silent_s = 0.0

    def look(self, look: Look) -> Stall:
        """Take in a look; how the rank stands now."""
        last, self._last = self._last, look
        self._learn(last, look)
        if last is None:
            return self._stall(look)
        seen_s = min(look.at_s - last.at_s, MAX_GAP_S)
        stood_s = max(0.0, seen_s - (look.starved_s - last.starved_s))
        is_same = look.place == last.place
        self._stalled_s = self._stalled_s + stood_s if is_same else 0.0
        is_silent = is_same and look.num_moves == last.num_moves
        self._silent_s = self._silent_s + stood_s if is_silent else 0.0
        return self._stall(look)

    def restarted(self) -> None:
        """Another attempt begins: what was learned stays, where the rank stood does not."""
        self._last = None
        self._stalled_s = self._silent_s = 0.0

    def _learn(self, last: Look | None, look: Look) -> None:
        # What lies before the first look is one pass of a start, and of other phases many.
        before = {} if last is None else last.phases_s
        for phase in _OF_STARTS if last is None else Phase:
            spent_s = look.phases_s.get(phase, 0.0) - before.get(phase, 0.0)
            if spent_s > 0 and _is_learnable(phase, look):
                self._passes.setdefault(phase, deque(maxlen=WINDOW)).append(spent_s)

    def _stall(self, look: Look) -> Stall:
        limit_s, source = self._limit(look)
        # One that is stopped gives no signs.
        needs_signs = look.phase is Phase.STEP and not look.is_stopped
        return Stall(
            stalled_s=self._silent_s if needs_signs else self._stalled_s,
            limit_s=limit_s,
            source=source,
            unchanged_s=self._stalled_s,
        )

    def _limit(self, look: Look) -> tuple[float | None, str]:
        limit_s, source = self._learned(look)
        if look.is_stopped and (limit_s is None or limit_s > STOPPED_S):
            return STOPPED_S, f"{STOPPED_S:g} s for a process that was stopped by a signal"
        return limit_s, source

    def _learned(self, look: Look) -> tuple[float | None, str]:
        if look.silent_limit_s is not None:
            return look.silent_limit_s, f"recovery.hang_timeout_s is {look.silent_limit_s:g} s"
        name = look.phase.name.lower()
        passes = self._passes.get(look.phase, ())
        if not passes or not _is_learnable(look.phase, look):
            return None, f"recovery.hang_timeout_s, since the length of {name} is not known yet"
        factor, floor_s = _patience(look, is_known=len(passes) >= KNOWN_PASSES)
        longest_s = max(passes)
        source = (
            f"{factor:g} x the longest {name} of the last {len(passes)} seen ({longest_s:.3g} s), "
            f"and {floor_s:g} s"
        )
        return factor * longest_s + floor_s, source


def _patience(look: Look, *, is_known: bool) -> tuple[float, float]:
    """How many times the longest pass, and how many seconds besides."""
    # That a stopped process is not at work need not be guessed.
    if look.phase is Phase.STEP and not look.is_stopped:
        return UNNAMED_FACTOR, UNNAMED_FLOOR_S
    return (USUAL_FACTOR, USUAL_FLOOR_S) if is_known else (EARLY_FACTOR, EARLY_FLOOR_S)


def _is_learnable(phase: Phase, look: Look) -> bool:
    if look.num_steps <= WARM_UP_STEPS:
        return phase in _OF_STARTS
    return phase not in _UNLEARNABLE
