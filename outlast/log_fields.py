"""What of a job's logs may be asked for by name, besides job and attempt."""

from __future__ import annotations

from typing import TypedDict


class LogFields(TypedDict, total=False):
    """As in LogsRequest."""

    rank: int | None
    follow: bool
    tail_bytes: int
    timestamps: bool
    since_s: float
    grep: str
