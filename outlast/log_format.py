"""What the services write about themselves: lines for people, or one JSON object on each.

Messages name what they are about (`job=%s node=%s`); as JSON these values are fields, so that
a log store finds them without parsing text. Other streams of a process are not ours: what a
library writes to standard error by itself stays as it is.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from types import TracebackType

logger = logging.getLogger(__name__)

_PRETTY = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONVERSION = re.compile(r"(?:(\w+)=)?%(?:%|[-#0 +]*\d*(?:\.\d+)?[hlL]?([diouxXeEfFgGcrsa]))")
_FIELDS = {"job": "job", "job_id": "job", "attempt": "attempt", "node": "node", "rank": "rank"}
# How an agent calls a worker: job, attempt and rank.
_WORKER = re.compile(r"(.+)/(\d+)/(\d+)")

Facts = dict[str, str | int]


class LogFormat(StrEnum):
    """How the log of a service is written."""

    PRETTY = "pretty"
    JSON = "json"


def set_up(log_format: LogFormat, known: Mapping[str, str] | None = None) -> None:
    """Have this process log to standard error; `known` are fields of each of its records."""
    handler = logging.StreamHandler()
    if log_format is LogFormat.PRETTY:
        handler.setFormatter(logging.Formatter(_PRETTY))
    else:
        handler.setFormatter(JsonFormatter(known or {}))
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def say_last(program: str, error: Exception) -> None:
    """Why a service ends: a line to standard error, in the format of its log."""
    handlers = logging.getLogger().handlers
    if any(isinstance(each.formatter, JsonFormatter) for each in handlers):
        logger.error("%s: %s", program, error)
    else:
        print(f"{program}: {error}", file=sys.stderr)


class JsonFormatter(logging.Formatter):
    """One JSON object for each record."""

    def __init__(self, known: Mapping[str, str]) -> None:
        super().__init__()
        self._known = known

    def format(self, record: logging.LogRecord) -> str:
        """Time in UTC with milliseconds, level, logger, message, and what the message names."""
        facts: dict[str, str | int] = {
            "time": _time(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._known,
            **named_facts(record),
        }
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts, ensure_ascii=False)


def named_facts(record: logging.LogRecord) -> Facts:
    """Job, attempt, node and rank, as far as a record's message names them."""
    arguments = record.args
    if not isinstance(arguments, tuple):
        return {}
    facts: Facts = {}
    for name, place in _named(str(record.msg)):
        if place >= len(arguments):
            break
        value = arguments[place]
        if name in _FIELDS:
            facts[_FIELDS[name]] = value if type(value) is int else str(value)
        elif found := _WORKER.fullmatch(str(value)):
            facts["job"] = found.group(1)
            facts["attempt"], facts["rank"] = int(found.group(2)), int(found.group(3))
    return facts


# As many as there are messages in the code, nearly.
@lru_cache(maxsize=1_024)
def _named(template: str) -> tuple[tuple[str, int], ...]:
    """Which arguments of a message have one of our names, in its order."""
    found = [match for match in _CONVERSION.finditer(template) if match.group(2)]
    names = [(match.group(1) or "", place) for place, match in enumerate(found)]
    return tuple((name, place) for name, place in names if name in _FIELDS or name == "worker")


def _time(at_s: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at_s))}.{int(at_s % 1 * 1000):03}Z"


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logger.critical("uncaught error", exc_info=(kind, error, traceback))
