"""Links that leave the rhythm of the training, though they carry as much as before. Pure.

Links that carry the gradients of one node's GPUs do so in the rhythm of its steps. One whose
traffic comes again after another time than it did, or after none that can be told, while that of
the links that kept time with it comes as before, is throttled, retransmits or waits for something
of its own: its bytes arrive, but not when the others' do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from diagnostics.core.host import Change, Subject
from diagnostics.core.windows import WINDOWS

# Windows by which a rhythm is known, and how many of them have to have it.
_USUAL_WINDOWS = 30
_LEAST_WINDOWS = 10
_STEADY = 0.8
# Periods are found in bins of 10 ms, of 30 s: those of one step vary by so much.
_TOLERANCE = 0.15
# Of a series that comes again after a time, the autocorrelation finds a multiple of it now and
# then, which is that within a bin or two.
_MULTIPLES = (2, 3)
_OF_MULTIPLES = 0.05
_LEAST_PEERS = 2
# Of what it carries by what it did, over that of its peers: else it carries something else.
_LEAST_SHARE, _MOST_SHARE = 0.75, 1.33


@dataclass(slots=True)
class _Link:
    """What is known of one link."""

    periods: deque[float | None] = field(default_factory=lambda: deque(maxlen=_USUAL_WINDOWS))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL_WINDOWS))
    peers: tuple[str, ...] = ()
    """Of the newest window in which it was in its rhythm."""
    usual_rate: float = 0.0
    num_out: int = 0
    num_in: int = 0

    @property
    def usual_s(self) -> float | None:
        """Its period; None where it has no steady one, or it is not known yet."""
        known = [each for each in self.periods if each is not None]
        if len(known) < _LEAST_WINDOWS:
            return None
        middle = median(known)
        num_alike = sum(is_same(each, middle) for each in known)
        return middle if num_alike >= _STEADY * len(self.periods) else None


def is_same(period_s: float | None, usual_s: float) -> bool:
    """Whether this is the usual period, or one that the same rhythm may be taken for."""
    if not period_s:
        return False
    ratio = max(period_s, usual_s) / min(period_s, usual_s)
    is_multiple = any(abs(ratio / each - 1) <= _OF_MULTIPLES for each in _MULTIPLES)
    return ratio - 1 <= _TOLERANCE or is_multiple


class RhythmWatch:
    """The links of one node during one attempt, window by window."""

    def __init__(self, windows_out: int) -> None:
        """`windows_out` in a row a link has to be out of its rhythm: as many as the time has in
        which periods are looked for, so that what was before the change is none of it."""
        self._windows_out = windows_out
        self._links: dict[str, _Link] = {}
        self.reported: dict[str, str] = {}
        """Links that are out of their rhythm now, and what was said of each."""

    def take(
        self,
        periods: Mapping[str, float | None],
        rates: Mapping[str, float],
        together: Mapping[str, Sequence[str]],
    ) -> list[Change]:
        """What is new since the window before.

        Args:
            periods: of each link in seconds, None where it has none.
            rates: what each carries in bytes per second; links that are judged otherwise already
                are left out.
            together: of each link, those that kept time with it.
        """
        for link in [link for link in self._links if link not in rates]:
            del self._links[link]
            self.reported.pop(link, None)
        usual = {link: known.usual_s for link, known in self._links.items()}
        going_on = {
            link
            for link, usual_s in usual.items()
            if usual_s is not None and is_same(periods[link], usual_s)
        }
        changes = []
        for link in sorted(rates):
            known = self._links.setdefault(link, _Link())
            known.rates.append(rates[link])
            usual_s = usual.get(link)
            if link in going_on:
                assert usual_s is not None
                self._goes_on(link, periods[link], self._peers(usual_s, together[link], usual))
            elif usual_s is not None and self._others_go_on(known, going_on):
                changes += self._is_out(link, periods[link], usual_s, going_on)
            else:
                # That of all is another one, as with longer sequences, or none is known.
                known.periods.append(periods[link])
                known.num_out = 0
        return changes

    def _peers(
        self, usual_s: float, together: Sequence[str], usual: Mapping[str, float | None]
    ) -> tuple[str, ...]:
        return tuple(
            peer
            for peer in together
            if (other_s := usual.get(peer)) is not None and is_same(other_s, usual_s)
        )

    def _goes_on(self, link: str, period_s: float | None, peers: tuple[str, ...]) -> None:
        known = self._links[link]
        known.periods.append(period_s)
        known.num_out = 0
        if link in self.reported:
            # As long as for any other finding.
            known.num_in += 1
            if known.num_in >= WINDOWS:
                del self.reported[link]
        else:
            known.peers = peers
            known.usual_rate = fmean(known.rates)

    @staticmethod
    def _others_go_on(known: _Link, going_on: set[str]) -> bool:
        num = sum(peer in going_on for peer in known.peers)
        return num >= _LEAST_PEERS and num > len(known.peers) / 2

    def _is_out(
        self, link: str, period_s: float | None, usual_s: float, going_on: set[str]
    ) -> list[Change]:
        known = self._links[link]
        known.num_out += 1
        known.num_in = 0
        if link in self.reported or known.num_out < self._windows_out:
            return []
        peers = [peer for peer in known.peers if peer in going_on]
        others = median(self._share(peer) for peer in peers)
        if not _LEAST_SHARE * others <= self._share(link) <= _MOST_SHARE * others:
            return []
        now = "with no period that is found" if period_s is None else f"after {period_s:.2f} s"
        message = (
            f"{link} has left its rhythm: it carries as much as it did, but that comes again {now}"
            f"; it was after {usual_s:.2f} s, as it still is on {len(peers)} links that kept time "
            f"with it"
        )
        self.reported[link] = message
        return [Change(subject=Subject.TRAFFIC, what=link, message=message)]

    def _share(self, link: str) -> float:
        """What it carried since the rhythm of one was left, of what it usually does."""
        known = self._links[link]
        recent = list(known.rates)[-self._windows_out :]
        return fmean(recent) / known.usual_rate if known.usual_rate > 0 else 0.0
