"""Steps of a job put together by the hour in which they ended, so that weeks of them stay small.

Rows come in the order in which they were written, each once. An hour is given out when it is over,
with how far the rows have been used up: a row behind an hour that is still open is read again by
the next reader, and an hour that was given out is not made a second time.

What does not belong here: where the rows and hours are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from diagnostics.core.history import HOUR_S, Hour
from diagnostics.core.launches import Launches
from diagnostics.core.periods import WARM_UP_STEPS

# A report may be late by a reconnection.
GRACE_S = 120.0
# Of an hour, for its median: as many as 1 s apart.
_MOST_TIMES = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What hours are made of. `version` rises with every row that is written."""

    version: int
    step: int
    attempt: int
    tokens: int
    duration_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadUntil:
    """Up to which row, and to which moment, a job's hours are done."""

    version: int = 0
    until_s: float = 0.0


@dataclass(slots=True)
class _Open:
    """An hour of an attempt that is not over."""

    first_version: int
    num_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    times_s: list[float] = field(default_factory=list)

    def take(self, row: StepFigures) -> None:
        if len(self.times_s) < _MOST_TIMES:
            self.times_s.append(row.duration_s)
        else:
            self.times_s[self.num_steps % _MOST_TIMES] = row.duration_s
        self.num_steps += 1
        self.tokens += row.tokens
        self.seconds += row.duration_s


class HourTable:
    """The open hours of one job."""

    def __init__(self, done: ReadUntil) -> None:
        self._done_s = done.until_s
        self._open: dict[tuple[float, int], _Open] = {}
        self._layouts: dict[int, str] = {}
        self._launches: dict[tuple[float, int], list[Launches]] = {}
        # Of the attempt that rows came of last.
        self._attempt = 0
        self._num_steps = 0
        self.version = done.version
        """Of the newest row that was taken in."""

    def attempt_has(self, attempt: int, layout: str) -> None:
        """Which layout an attempt has; of others it is not known."""
        self._layouts[attempt] = layout

    def take(self, rows: Iterable[StepFigures]) -> None:
        """Rows in the order of their versions."""
        for row in rows:
            self.version = max(self.version, row.version)
            if row.attempt != self._attempt:
                self._attempt, self._num_steps = row.attempt, 0
            self._num_steps += 1
            begun_s = _hour_of(row.at_s)
            is_steady = row.tokens > 0 and self._num_steps > WARM_UP_STEPS
            if not is_steady or begun_s < self._done_s:
                continue
            key = (begun_s, row.attempt)
            if key not in self._open:
                self._open[key] = _Open(first_version=row.version)
            self._open[key].take(row)

    def seen(self, at_s: float, attempt: int, launches: Launches) -> None:
        """What a window of the attempt has shown of its replicas."""
        self._launches.setdefault((_hour_of(at_s), attempt), []).append(launches)

    def close(self, now_s: float, *, is_last: bool = False) -> tuple[list[Hour], ReadUntil]:
        """The hours that are over, all of them when the job is; and how far they go."""
        over = [key for key in self._open if is_last or key[0] + HOUR_S + GRACE_S <= now_s]
        hours = [self._hour(*key, self._open.pop(key)) for key in sorted(over)]
        if hours:
            self._done_s = max(self._done_s, hours[-1].begun_s + HOUR_S)
        self._launches = {
            key: seen for key, seen in self._launches.items() if key[0] >= self._done_s
        }
        behind = min((each.first_version for each in self._open.values()), default=None)
        version = self.version if behind is None else behind - 1
        return hours, ReadUntil(version=version, until_s=self._done_s)

    def _hour(self, begun_s: float, attempt: int, known: _Open) -> Hour:
        launches = self._launches.get((begun_s, attempt), [])
        return Hour(
            begun_s=begun_s,
            attempt=attempt,
            layout=self._layouts.get(attempt, ""),
            num_steps=known.num_steps,
            tokens=known.tokens,
            seconds=known.seconds,
            step_s=median(known.times_s),
            spread_s=median(each.spread_s for each in launches) if launches else None,
            late_s=median(each.late_s for each in launches) if launches else None,
        )


def _hour_of(at_s: float) -> float:
    return at_s // HOUR_S * HOUR_S
