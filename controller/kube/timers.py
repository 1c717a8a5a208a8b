"""How long things have been as they are, between one look and the next."""

from __future__ import annotations


class Timers:
    """Named stretches of time: each lasts for as long as every look asks for it."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        # Since when, and until when, something is put off.
        self._held_s: dict[str, tuple[float, float]] = {}
        self._asked: dict[str, None] = {}
        self._now_s = 0.0

    def begin(self, now_s: float) -> None:
        """A look begins."""
        self._now_s = now_s
        self._asked.clear()

    def for_s(self, what: str) -> float:
        """For how long this has been asked for, look after look."""
        self._asked[what] = None
        return self._now_s - self._since_s.setdefault(what, self._now_s)

    def hold(self, what: str, now_s: float, until_s: float) -> None:
        """Nothing is to be tried before then."""
        since_s, _ = self._held_s.get(what, (now_s, until_s))
        self._held_s[what] = (since_s, until_s)

    def held_for_s(self, what: str) -> float:
        """For how long this has been put off, again and again; 0 when it was not yet."""
        self._asked[what] = None
        since_s, _ = self._held_s.get(what, (self._now_s, self._now_s))
        return self._now_s - since_s

    def is_held(self, what: str) -> bool:
        _, until_s = self._held_s.get(what, (0.0, 0.0))
        return self._now_s < until_s

    def end(self) -> None:
        """The look is over: what nobody asked for has ended."""
        for kept in (self._since_s, self._held_s):
            for what in [what for what in kept if what not in self._asked]:
                del kept[what]
