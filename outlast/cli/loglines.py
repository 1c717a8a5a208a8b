"""Chunks of many ranks' logs put together into whole lines, and what is missing of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cli.describe import clock, iso_time

if TYPE_CHECKING:
    from outlast.v1.jobs_pb2 import LogsResponse

# A line without an end would otherwise be held for ever.
MAX_LINE_BYTES = 64 * 1024


@dataclass(slots=True)
class _Begun:
    """The unfinished last line of a rank, and when it was begun."""

    text: bytes = b""
    at_s: float = 0.0
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line that a rank wrote."""

    attempt: int
    node: str
    rank: int
    text: str
    at_s: float
    """When it was begun; 0 when nobody asked."""

    def labelled(self, *, is_full: bool = False) -> str:
        """With its time if known and its rank before it; in full, with attempt and node, too."""
        when = f"{clock(self.at_s)} " if self.at_s else ""
        before = f"attempt {self.attempt} {self.node} " if is_full else ""
        return f"{when}[{before}rank {self.rank}] {self.text}"

    def facts(self, job_id: str) -> dict[str, object]:
        """For programs."""
        return {
            "time": iso_time(self.at_s) if self.at_s else None,
            "job_id": job_id,
            "attempt": self.attempt,
            "node": self.node,
            "rank": self.rank,
            "line": self.text,
        }


class Lines:
    """Holds back the unfinished last line of each rank of each attempt."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, int], _Begun] = {}

    def take(
        self, rank: int, data: bytes, at_s: float = 0.0, *, attempt: int = 0, node: str = ""
    ) -> list[Line]:
        """The lines that `data` completes."""
        begun = self._begun.setdefault((attempt, rank), _Begun())
        first_s = begun.at_s if begun.text else at_s
        *whole, rest = (begun.text + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            whole.append(rest)
            rest = b""
        self._begun[attempt, rank] = _Begun(rest, at_s if whole else first_s, node)
        times = [first_s, *([at_s] * len(whole))]
        return [
            _line((attempt, rank), node, line, line_s)
            for line, line_s in zip(whole, times, strict=False)
        ]

    def rest(self, only: int | None = None) -> list[Line]:
        """Last lines that never ended, of all ranks or of one; they are no longer held back."""
        whose = sorted(key for key in self._begun if only in (None, key[1]))
        ended = [(key, self._begun.pop(key)) for key in whose]
        return [
            _line(key, begun.node, begun.text, begun.at_s) for key, begun in ended if begun.text
        ]


class Missing:
    """Whose logs are missing, and why, as far as they were read."""

    def __init__(self) -> None:
        self._messages: dict[str, str] = {}

    @property
    def messages(self) -> tuple[str, ...]:
        """What is missing by now."""
        return tuple(self._messages.values())

    def take(self, chunk: LogsResponse) -> str:
        """What is to be said of a chunk that has no data."""
        ranks = _ranks(chunk)
        who = f"node {chunk.node}" + (f" ({ranks})" if ranks else "") if chunk.node else ranks
        key = chunk.node or ranks
        if not chunk.missing.reason:
            self._messages.pop(key, None)
            return f"{who} answers again"
        self._messages[key] = f"logs of {who} are missing: {chunk.missing.reason}"
        return self._messages[key]


def _ranks(chunk: LogsResponse) -> str:
    """The ranks that a chunk without data is about; "" when that is not known."""
    first, num_ranks = chunk.missing.first_rank, chunk.missing.num_ranks
    if not num_ranks:
        return ""
    return f"rank {first}" if num_ranks == 1 else f"ranks {first}-{first + num_ranks - 1}"


def _line(whose: tuple[int, int], node: str, line: bytes, at_s: float) -> Line:
    text = line.decode(errors="replace")
    return Line(attempt=whose[0], node=node, rank=whose[1], text=text, at_s=at_s)
