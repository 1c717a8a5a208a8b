"""Chunks of many ranks' logs put together into whole lines, and what is missing of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.cli.describe import clock

if TYPE_CHECKING:
    from outlast.v1.jobs_pb2 import LogsResponse

# A line without an end would otherwise be held for ever.
MAX_LINE_BYTES = 64 * 1024


@dataclass(slots=True)
class _Begun:
    """The unfinished last line of a rank, and when it was begun."""

    text: bytes = b""
    at_s: float = 0.0


class Lines:
    """Holds back the unfinished last line of each rank."""

    def __init__(self) -> None:
        self._begun: dict[int, _Begun] = {}

    def take(self, rank: int, data: bytes, at_s: float = 0.0) -> list[str]:
        """The lines that `data` completes, each with its rank before it, and its time if known."""
        begun = self._begun.setdefault(rank, _Begun())
        first_s = begun.at_s if begun.text else at_s
        *whole, rest = (begun.text + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            whole.append(rest)
            rest = b""
        self._begun[rank] = _Begun(rest, at_s if whole else first_s)
        times = [first_s, *([at_s] * len(whole))]
        return [_line(rank, line, line_s) for line, line_s in zip(whole, times, strict=False)]

    def rest(self, only: int | None = None) -> list[str]:
        """Last lines that never ended, of all ranks or of one; they are no longer held back."""
        ranks = sorted(self._begun) if only is None else [only]
        ended = [(rank, self._begun.pop(rank, _Begun())) for rank in ranks]
        return [_line(rank, begun.text, begun.at_s) for rank, begun in ended if begun.text]


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


def _line(rank: int, line: bytes, at_s: float) -> str:
    when = f"{clock(at_s)} " if at_s else ""
    return f"{when}[rank {rank}] {line.decode(errors='replace')}"
