"""Chunks of many ranks' logs put together into whole lines."""

from __future__ import annotations

# A line without an end would otherwise be held for ever.
MAX_LINE_BYTES = 64 * 1024


class Lines:
    """Holds back the unfinished last line of each rank."""

    def __init__(self) -> None:
        self._parts: dict[int, bytes] = {}

    def take(self, rank: int, data: bytes) -> list[str]:
        """The lines that `data` completes, each with its rank before it."""
        *whole, rest = (self._parts.get(rank, b"") + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            whole.append(rest)
            rest = b""
        self._parts[rank] = rest
        return [_line(rank, line) for line in whole]

    def rest(self) -> list[str]:
        """Last lines that never ended."""
        return [_line(rank, part) for rank, part in sorted(self._parts.items()) if part]


def _line(rank: int, line: bytes) -> str:
    return f"[rank {rank}] {line.decode(errors='replace')}"
