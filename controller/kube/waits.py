"""How long things have been as they are, between one look and the next."""

from __future__ import annotations


class Waits:
    """Named stretches of time: each lasts for as long as every look asks for it."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._held_until_s: dict[str, float] = {}
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

    def hold(self, what: str, until_s: float) -> None:
        """Nothing is to be tried before then."""
        self._held_until_s[what] = until_s

    def is_held(self, what: str) -> bool:
        return self._now_s < self._held_until_s.get(what, 0.0)

    def end(self) -> None:
        """The look is over: what nobody asked for has ended."""
        for what in [what for what in self._since_s if what not in self._asked]:
            del self._since_s[what]
            self._held_until_s.pop(what, None)
