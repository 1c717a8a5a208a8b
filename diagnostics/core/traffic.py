"""What the links of a node carry, at the scale of milliseconds. Pure.

Counters of bytes are sampled many times a second, and summed up in windows of seconds. The links
of a node that carry the gradients of its GPUs do so at the same times: one that carries much less
than it did, while those that kept time with it go on, is broken or starved. That is known within
seconds, when the step that waits for it is not late yet by any measure. One that carries as much,
but in another rhythm than those, is found by `diagnostics.core.rhythm`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import pairwise
from statistics import fmean, median

from diagnostics.core.host import Change, Subject
from diagnostics.core.rhythm import RhythmWatch
from diagnostics.core.windows import Lasting

WINDOW_S = 2.0
# Heartbeats and scrapes go on whatever ranks do: a link that carries less is silent. It is judged
# by pieces of time in which one of those is not much.
SILENT_BYTES_PER_S = 1e6
SILENCE_BIN_S = 0.05
# The rhythm is looked for in the last seconds, in bins of so long.
RHYTHM_S = 30.0
BIN_S = 0.01
_BINS_OF_SILENCE = round(SILENCE_BIN_S / BIN_S)
_SILENT_BYTES = SILENT_BYTES_PER_S * SILENCE_BIN_S
_LEAST_RHYTHM_S = 8.0
# A step may be shorter than that, but what comes so often is the messages of one collective.
LEAST_PERIOD_S = 0.05
# How alike a series is to itself a period later, of 1; after two periods half of that.
_LEAST_ALIKE = 0.4
_NEARLY = 0.8
# The rhythm is that of the steps, and changes seldom.
_WINDOWS_OF_RHYTHM = 4
# To look for one costs as much as all else of a window.
_WINDOWS_OF_NO_RHYTHM = 2
# Windows by which it is known what a link usually carries, and how many are enough.
_USUAL_WINDOWS = 30
_LEAST_WINDOWS = 10
# Links keep time when, each over its mean, they have so much in common.
_COMMON = 0.8
# And usually carry at most so many times what the other does.
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

    is_rdma: bool
    """Whether it is an RDMA port; else it is a network device."""
    seconds: float
    num_samples: int
    received: Rates
    sent: Rates
    longest_silence_s: float
    """Up to its end or within it, also if it began before; in steps of `SILENCE_BIN_S`."""
    period_s: float | None
    """After which its traffic comes again; None where it has no rhythm, or none yet."""

    @property
    def bytes_per_s(self) -> float:
        """In both directions."""
        return self.received.mean + self.sent.mean


@dataclass(slots=True)
class Sampled:
    """One link, sample by sample. Taking one costs little; what they say is worked out in `cut`."""

    at_s: InitVar[float]
    received: InitVar[int]
    sent: InitVar[int]
    is_rdma: bool = False
    # Of this window, and before them the last one of the window before.
    _rows: list[tuple[float, int, int]] = field(init=False)
    # Bytes by equal pieces of time: of the last seconds, of one silence's bin that is not
    # complete, and of the piece that is not complete, which ends at a time.
    _bins: deque[float] = field(default_factory=lambda: deque(maxlen=round(RHYTHM_S / BIN_S)))
    _unjudged: list[float] = field(default_factory=list)
    _count: float = 0.0
    _end_s: float = field(init=False)
    _silent_s: float = 0.0
    _num_windows: int = 0
    _period_s: float | None = None

    def __post_init__(self, at_s: float, received: int, sent: int) -> None:
        self._rows = [(at_s, received, sent)]
        self._end_s = at_s + BIN_S

    def add(self, at_s: Sequence[float], received: Sequence[int], sent: Sequence[int]) -> None:
        """The counters at later moments."""
        last_s = self._rows[-1][0]
        for row in zip(at_s, received, sent, strict=True):
            if row[0] > last_s:
                self._rows.append(row)
                last_s = row[0]

    def cut(self) -> Window | None:
        """The window that ends with the last sample; None where it has none."""
        if len(self._rows) < 2:
            return None
        rows, self._rows = self._rows, self._rows[-1:]
        steps = [
            # Of a device that was reset, the counter begins anew.
            (
                at_s,
                at_s - before_s,
                now - then if now > then else 0,
                now_sent - then_sent if now_sent > then_sent else 0,
            )
            for (before_s, then, then_sent), (at_s, now, now_sent) in pairwise(rows)
        ]
        whole = self._fill(steps)
        self._bins.extend(whole)
        longest_s = self._longest_silence_s(whole)
        every = _WINDOWS_OF_NO_RHYTHM if self._period_s is None else _WINDOWS_OF_RHYTHM
        if self._num_windows % every == 0:
            self._period_s = period_s(self._bins, BIN_S)
        self._num_windows += 1
        seconds = rows[-1][0] - rows[0][0]
        return Window(
            is_rdma=self.is_rdma,
            seconds=seconds,
            num_samples=len(steps),
            received=_rates([(count, part_s) for _, part_s, count, _ in steps], seconds),
            sent=_rates([(count, part_s) for _, part_s, _, count in steps], seconds),
            longest_silence_s=longest_s,
            period_s=self._period_s,
        )

    def _fill(self, steps: Sequence[tuple[float, float, int, int]]) -> list[float]:
        """Spread what came between two samples; the pieces that are complete by now."""
        whole = []
        end_s, count = self._end_s, self._count
        for at_s, seconds, received, sent in steps:
            rate, left_s = (received + sent) / seconds, seconds
            while at_s >= end_s:
                part_s = min(left_s, max(0.0, end_s - (at_s - left_s)))
                whole.append(count + rate * part_s)
                left_s -= part_s
                count = 0.0
                end_s += BIN_S
            count += rate * left_s
        self._end_s, self._count = end_s, count
        return whole

    def _longest_silence_s(self, whole: Sequence[float]) -> float:
        """The longest silence, with these pieces of time."""
        pieces = [*self._unjudged, *whole]
        longest_s = self._silent_s
        num_whole = len(pieces) // _BINS_OF_SILENCE * _BINS_OF_SILENCE
        for first in range(0, num_whole, _BINS_OF_SILENCE):
            is_silent = sum(pieces[first : first + _BINS_OF_SILENCE]) < _SILENT_BYTES
            self._silent_s = self._silent_s + SILENCE_BIN_S if is_silent else 0.0
            longest_s = max(longest_s, self._silent_s)
        self._unjudged = pieces[num_whole:]
        return longest_s


def _rates(counts: Sequence[tuple[int, float]], whole_s: float) -> Rates:
    rates = [count / seconds for count, seconds in counts]
    return Rates(
        least=min(rates), mean=sum(count for count, _ in counts) / whole_s, most=max(rates)
    )


def period_s(series: Sequence[float], bin_s: float) -> float | None:
    """After how long a series comes again; None where it does not, at least three times.

    By the autocorrelation of where it is above its mean, up to a third of its length; it is as
    alike to itself after two periods, too. Bits of one number stand for the bins: a thousand lags
    take half a millisecond.
    """
    num = len(series)
    if num * bin_s < _LEAST_RHYTHM_S:
        return None
    middle = sum(series) / num
    bits = int("".join("1" if each > middle else "0" for each in series), 2)
    share = bits.bit_count() / num
    spread = share * (1 - share)
    if spread <= 0:
        return None

    def alike_after(lag: int) -> float:
        both = (bits & (bits >> lag)).bit_count()
        return (both / (num - lag) - share * share) / spread

    alike = [alike_after(lag) for lag in range(num // 3)]
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
    found = next(lag for lag in peaks if alike[lag] >= _NEARLY * best)
    again = max(alike_after(2 * found + more) for more in range(-2, 3))
    return found * bin_s if again >= best / 2 else None


class LinkWatch:
    """The links of one node during one attempt, window by window."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[float]] = {}
        self._rdma: set[str] = set()
        self._stopped: dict[str, int] = {}
        self._starved: dict[str, Lasting] = {}
        self._reported: dict[str, str] = {}
        self._rhythm = RhythmWatch(round(RHYTHM_S / WINDOW_S))

    def take(self, windows: Mapping[str, Window]) -> list[Change]:
        """What is new since the window before."""
        usual = {
            link: fmean(rates) for link, rates in self._kept.items() if len(rates) >= _LEAST_WINDOWS
        }
        was_reported = bool(self.findings)
        changes, gone = [], []
        together: dict[str, list[str]] = {}
        for link in sorted(self._kept.keys() | windows.keys()):
            peers = [peer for peer in windows if peer != link and self._keep_time(link, peer)]
            together[link] = peers
            shares = [windows[peer].bytes_per_s / usual[peer] for peer in peers]
            # Peers that carry more than they do usually say nothing of a link that goes on.
            others = min(1.0, median(shares)) if len(peers) >= _LEAST_PEERS else 0.0
            # While all of them rest, as during a checkpoint, nothing is known of one.
            if others >= _GOING_ON:
                changes += self._judged(link, windows.get(link), usual[link], others, len(peers))
            elif link not in windows and link not in self._reported:
                gone.append(link)
        for link, window in windows.items():
            if link not in self._reported:
                kept = self._kept.setdefault(link, deque(maxlen=_USUAL_WINDOWS))
                kept.append(window.bytes_per_s)
        self._rdma |= {link for link, window in windows.items() if window.is_rdma}
        for link in gone:
            self._rdma.discard(link)
            for known in (self._kept, self._stopped, self._starved):
                known.pop(link, None)
        # What carries less than it did has been told of, or soon is.
        rates = {
            link: each.bytes_per_s for link, each in windows.items() if link not in self._reported
        }
        periods = {link: window.period_s for link, window in windows.items()}
        changes += self._rhythm.take(periods, rates, together)
        # One incident stands for all links of a node: it is over with the last of them.
        if was_reported and not self.findings:
            changes.append(Change(subject=Subject.TRAFFIC, what="each link", message=""))
        return changes

    @property
    def findings(self) -> Mapping[str, str]:
        """What is wrong with links now, by their names."""
        return {**self._rhythm.reported, **self._reported}

    def _keep_time(self, link: str, peer: str) -> bool:
        """Whether both carried alike, and at the same times."""
        ours, theirs = self._kept.get(link, ()), self._kept.get(peer, ())
        if min(len(ours), len(theirs)) < _LEAST_WINDOWS or peer in self._reported:
            return False
        # Beside RDMA ports, devices serve other ends: storage, and the controller.
        if (link in self._rdma) != (peer in self._rdma):
            return False
        mean, other = fmean(ours), fmean(theirs)
        less, more = sorted((mean, other))
        if less < SILENT_BYTES_PER_S or more > _ALIKE * less:
            return False
        # What is kept of one that was reported is of another time.
        if link in self._reported:
            return True
        num = min(len(ours), len(theirs))
        pairs = zip(list(ours)[-num:], list(theirs)[-num:], strict=True)
        return fmean(min(one / mean, another / other) for one, another in pairs) >= _COMMON

    def _judged(
        self, link: str, window: Window | None, usual: float, others: float, num_peers: int
    ) -> list[Change]:
        share = 0.0 if window is None else window.bytes_per_s / usual
        has_stopped = share < _STOPPED * others
        # A burst that falls into the window beside that of the others is not missing.
        self._stopped[link] = self._stopped.get(link, 0) + 1 if has_stopped else 0
        starved = self._starved.setdefault(link, Lasting())
        lasting = starved.take(bad=share < _STARVED * others)
        if link in self._reported:
            if lasting is False:
                del self._reported[link]
            return []
        if self._stopped[link] < 2 and lasting is not True:
            return []
        # It is over when it has been well for as long as any other.
        starved.is_reported = True
        if window is None:
            what = "is gone"
        elif has_stopped:
            what = f"has nearly stopped ({window.bytes_per_s / 1e6:.1f} MB/s)"
        else:
            what = f"carries less than it did ({window.bytes_per_s / 1e6:.1f} MB/s)"
        message = (
            f"{link} {what}: it usually carries {usual / 1e6:.1f} MB/s, and {num_peers} links that "
            f"kept time with it go on"
        )
        self._reported[link] = message
        return [Change(subject=Subject.TRAFFIC, what=link, message=message)]
