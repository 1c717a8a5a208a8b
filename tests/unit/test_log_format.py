"""The log of a service as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from outlast.log_format import JsonFormatter


def written(message: str, *arguments: object, exc_info: Any = None) -> dict[str, Any]:
    """A record as an agent's log has it."""
    record = logging.LogRecord(
        "controller.agent", logging.WARNING, __file__, 1, message, arguments, exc_info
    )
    record.created = 1_700_000_000.125
    line = JsonFormatter({"node": "n7"}).format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_record_is_one_object_with_what_its_message_names() -> None:
    assert written("late: job=%s attempt=%d rank=%d silent_s=%.1f 100%%", "gpt-1", 3, 12, 6.25) == {
        "time": "2023-11-14T22:13:20.125Z",
        "level": "WARNING",
        "logger": "controller.agent",
        "message": "late: job=gpt-1 attempt=3 rank=12 silent_s=6.2 100%",
        "node": "n7",
        "job": "gpt-1",
        "attempt": 3,
        "rank": 12,
    }


@pytest.mark.parametrize(
    ("message", "arguments", "expected"),
    [
        ("worker ended: worker=%s pid=%s", ("gpt-1/2/5", 77), ("gpt-1", 2, 5)),
        # Ranks of a job that is not named so.
        ("worker ended: worker=%s", ("standby",), (None, None, None)),
        ("%s of job=%s", ("one", "gpt-2"), ("gpt-2", None, None)),
        ("nothing is named", (), (None, None, None)),
        ("by name: %(job)s", ({"job": "gpt-3"},), (None, None, None)),
    ],
)
def test_what_a_message_names(
    message: str, arguments: tuple[object, ...], expected: tuple[object, ...]
) -> None:
    found = written(message, *arguments)
    assert (found.get("job"), found.get("attempt"), found.get("rank")) == expected


def test_the_node_that_a_message_names_is_the_one() -> None:
    assert written("lost: node=%s", "n8")["node"] == "n8"
    assert written("lost")["node"] == "n7"


def test_an_error_is_in_the_object_of_its_record() -> None:
    try:
        raise ValueError("no é")
    except ValueError:
        found = written("failed", exc_info=sys.exc_info())
    assert found["exception"].endswith("ValueError: no é")
    assert found["exception"].startswith("Traceback")
