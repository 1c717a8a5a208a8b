"""What the links of a node carry, at the scale of milliseconds. Pure.

Counters of bytes are sampled many times a second, and summed up in windows of seconds. The links
of a node that carry the gradients of its GPUs have the same rhythm: one that carries much less
than it did, while others that carried as much go on, is broken or starved. That is known within
seconds, when the step that waits for it is not late yet by any measure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from diagnostics.core.host import Change, Subject
from diagnostics.core.windows import Lasting

WINDOW_S = 2.0
# A link that carries less is silent: heartbeats and scrapes go on whatever the ranks do.
SILENT_BYTES_PER_S = 1e6
# The rhythm is looked for in the last seconds, in bins of so long.
RHYTHM_S = 30.0
BIN_S = 0.01
# A step may be shorter than that, but what comes so often is the messages of one collective.
LEAST_PERIOD_S = 0.05
# How alike a series is to itself a period later, of 1.
_LEAST_ALIKE = 0.4
_NEARLY = 0.8
# The rhythm is that of the steps, and changes seldom.
_WINDOWS_OF_RHYTHM = 4
# Windows by which it is known what a link usually carries.
_USUAL_WINDOWS = 30
_LEAST_WINDOWS = 5
# Links carry alike when one usually carries at most twice what the other does.
_ALIKE = 2.0
_LEAST_PEERS = 2
# A share of what it usually carries, over that of its peers.
_STOPPED = 0.1
_STARVED = 0.5
# Of the peers, so that they go on.
_GOING_ON = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second in one direction, of the samples of a window."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a link carried for some seconds."""

    seconds: float
    num_samples: int
    received: Rates
    sent: Rates
    longest_silence_s: float
    """In which neither direction carried more than `SILENT_BYTES_PER_S`."""
    period_s: float | None
    """After which its traffic comes again; None where it has no rhythm, or none yet."""

    @property
    def bytes_per_s(self) -> float:
        """In both directions."""
        return self.received.mean + self.sent.mean


@dataclass(slots=True)
class Sampled:
    """One link, sample by sample. Taking one costs little; what they say is worked out in `cut`."""

    at_s: float
    received: int
    sent: int
    # Of this window, and before them the last one of the window before.
    _rows: list[tuple[float, int, int]] = field(init=False)
    _silent_since_s: float = field(init=False)
    # Bytes in each bin of the last seconds, and where the last one of them ends.
    _bins: deque[float] = field(default_factory=lambda: deque(maxlen=round(RHYTHM_S / BIN_S)))
    _bin_end_s: float = field(init=False)
    _in_bin: float = 0.0
    _num_windows: int = 0
    _period_s: float | None = None

    def __post_init__(self) -> None:
        self._rows = [(self.at_s, self.received, self.sent)]
        self._silent_since_s = self.at_s
        self._bin_end_s = self.at_s + BIN_S

    def add(self, at_s: float, received: int, sent: int) -> None:
        """The counters at a later moment."""
        if at_s > self._rows[-1][0]:
            self._rows.append((at_s, received, sent))

    def cut(self) -> Window | None:
        """The window that ends with the last sample; None where it has none."""
        if len(self._rows) < 2:
            return None
        rows, self._rows = self._rows, self._rows[-1:]
        steps = [
            # Of a device that was reset, the counter begins anew.
            (at_s, at_s - before_s, max(0, now - then), max(0, now_sent - then_sent))
            for (before_s, then, then_sent), (at_s, now, now_sent) in pairwise(rows)
        ]
        longest_silence_s = 0.0
        for at_s, seconds, received, sent in steps:
            if received + sent > SILENT_BYTES_PER_S * seconds:
                silence_s = at_s - seconds - self._silent_since_s
                longest_silence_s = max(longest_silence_s, silence_s)
                self._silent_since_s = at_s
            self._fill(at_s, seconds, received + sent)
        if self._num_windows % _WINDOWS_OF_RHYTHM == 0:
            self._period_s = period_s(self._bins, BIN_S)
        self._num_windows += 1
        (begun_s, *_), (end_s, *_) = rows[0], rows[-1]
        return Window(
            seconds=end_s - begun_s,
            num_samples=len(steps),
            received=_rates([(received, seconds) for _, seconds, received, _ in steps]),
            sent=_rates([(sent, seconds) for _, seconds, _, sent in steps]),
            longest_silence_s=max(longest_silence_s, end_s - self._silent_since_s),
            period_s=self._period_s,
        )

    def _fill(self, at_s: float, seconds: float, count: int) -> None:
        """Spread what came since the last sample over the bins that this time belongs to."""
        left_s = seconds
        while at_s >= self._bin_end_s:
            part_s = min(left_s, max(0.0, self._bin_end_s - (at_s - left_s)))
            self._bins.append(self._in_bin + count * part_s / seconds)
            left_s -= part_s
            self._in_bin = 0.0
            self._bin_end_s += BIN_S
        self._in_bin += count * left_s / seconds


def _rates(counts: Sequence[tuple[int, float]]) -> Rates:
    rates = [count / seconds for count, seconds in counts]
    whole_s = sum(seconds for _, seconds in counts)
    return Rates(
        least=min(rates), mean=sum(count for count, _ in counts) / whole_s, most=max(rates)
    )


def period_s(series: Sequence[float], bin_s: float) -> float | None:
    """After how long a series comes again; None where it does not.

    By the autocorrelation of where it is above its mean, up to a third of its length, which then
    has it three times. Bits of one number stand for the bins: a thousand lags take half a
    millisecond.
    """
    num = len(series)
    if num < 3 * LEAST_PERIOD_S / bin_s:
        return None
    middle = sum(series) / num
    bits = int("".join("1" if each > middle else "0" for each in series), 2)
    share = bits.bit_count() / num
    spread = share * (1 - share)
    if spread <= 0:
        return None
    alike = [
        ((bits & (bits >> lag)).bit_count() / (num - lag) - share * share) / spread
        for lag in range(num // 3)
    ]
    # Near lag 0 everything is like itself.
    differs = next((lag for lag, each in enumerate(alike) if each < 0), len(alike))
    peaks = [
        lag
        for lag in range(max(differs, round(LEAST_PERIOD_S / bin_s)), len(alike) - 1)
        if alike[lag] >= alike[lag - 1] and alike[lag] > alike[lag + 1]
    ]
    best = max((alike[lag] for lag in peaks), default=0.0)
    if best < _LEAST_ALIKE:
        return None
    # Twice the period is as good as the period.
    return next(lag for lag in peaks if alike[lag] >= _NEARLY * best) * bin_s


class LinkWatch:
    """The links of one node, window by window."""

    def __init__(self) -> None:
        self._usual: dict[str, deque[float]] = {}
        self._starved: dict[str, Lasting] = {}
        self._reported: set[str] = set()

    def take(self, windows: Mapping[str, Window]) -> list[Change]:
        """What is new since the window before."""
        known = {
            link: median(rates)
            for link, rates in self._usual.items()
            if len(rates) >= _LEAST_WINDOWS
        }
        changes = []
        for link, window in windows.items():
            peers = [
                windows[peer].bytes_per_s / known[peer]
                for peer in windows
                if peer != link and _are_alike(known.get(link, 0.0), known.get(peer, 0.0))
            ]
            change = self._judged(link, window, known.get(link, 0.0), peers)
            if change is not None:
                changes.append(change)
            if link not in self._reported:
                kept = self._usual.setdefault(link, deque(maxlen=_USUAL_WINDOWS))
                kept.append(window.bytes_per_s)
        for gone in self._usual.keys() - windows.keys():
            del self._usual[gone]
            self._starved.pop(gone, None)
            if gone in self._reported:
                self._reported.discard(gone)
                changes.append(Change(subject=Subject.TRAFFIC, what=gone, message=""))
        return changes

    def _judged(
        self, link: str, window: Window, usual: float, peers: Sequence[float]
    ) -> Change | None:
        if len(peers) < _LEAST_PEERS:
            return None
        others = median(peers)
        # While all of them rest, as during a checkpoint, nothing is known of one.
        if others < _GOING_ON:
            return None
        share = window.bytes_per_s / usual
        has_stopped = share < _STOPPED * others
        starved = self._starved.setdefault(link, Lasting())
        lasting = starved.take(bad=share < _STARVED * others)
        if link not in self._reported and (has_stopped or lasting is True):
            self._reported.add(link)
            # It is over when it has been well for as long as any other.
            starved.is_reported = True
            what = "has nearly stopped" if has_stopped else "carries less than before"
            message = (
                f"{link} {what}: {window.bytes_per_s / 1e6:.1f} MB/s, of usually "
                f"{usual / 1e6:.1f}, while {len(peers)} links that carried as much go on "
                f"({others:.0%} of what is usual); longest silence "
                f"{window.longest_silence_s:.2f} s"
            )
            return Change(subject=Subject.TRAFFIC, what=link, message=message)
        if link in self._reported and lasting is False:
            self._reported.discard(link)
            return Change(subject=Subject.TRAFFIC, what=link, message="")
        return None


def _are_alike(one: float, other: float) -> bool:
    less, more = sorted((one, other))
    return less >= SILENT_BYTES_PER_S and more <= _ALIKE * less
