"""What is exported: log records of our own, lines of workers, incidents."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outlast.log_format import named_facts

# Of libraries that an export itself uses: it must not make the next one.
_OWN = ("opentelemetry", "urllib3", "requests", "grpc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One log record."""

    at_ns: int
    """Since the Unix epoch."""
    body: str
    level: int = logging.NOTSET
    """As in `logging`; a worker's line has none."""
    scope: str = ""
    """Who wrote it: a logger's name."""
    attributes: Mapping[str, str | int] = field(default_factory=dict)


class RecordHandler(logging.Handler):
    """Gives the log of this process to an export, too."""

    def __init__(self, put: Callable[[Record], None]) -> None:
        super().__init__()
        self._put = put
        self._text = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging` in any thread; never waits."""
        if record.name.partition(".")[0] in _OWN:
            return
        try:
            attributes = {f"outlast.{name}": value for name, value in named_facts(record).items()}
            if record.exc_info:
                attributes["exception.stacktrace"] = self._text.formatException(record.exc_info)
            self._put(
                Record(
                    at_ns=round(record.created * 1e9),
                    body=record.getMessage(),
                    level=record.levelno,
                    scope=record.name,
                    attributes=attributes,
                )
            )
        except Exception:  # noqa: BLE001  # as every handler does
            self.handleError(record)
