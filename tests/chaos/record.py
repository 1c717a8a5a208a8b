"""What rows came to, in a file that is whole after each of them.

All rows take hours: a run that was interrupted goes on with those that have not passed.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

from tests.chaos.expected import Outcome


class Results:
    """A file of results, or nothing where `path` is None. Thread-safe."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, Any]] = {}
        self._healthy: list[dict[str, Any]] = []
        if path is not None and path.exists():
            document = json.loads(path.read_text())
            self._rows = {row["row"]: row for row in document["rows"]}
            self._healthy = document["healthy"]

    def has_passed(self, name: str) -> bool:
        return name in self._rows and bool(self._rows[name]["passed"])

    def has_been_healthy(self, for_s: float) -> bool:
        """Whether nothing was taken for a fault in training of at least so long."""
        return any(
            each["seconds"] >= for_s and not each["false_positives"] for each in self._healthy
        )

    def add(self, name: str, problems: tuple[str, ...], outcome: Outcome | None) -> None:
        """Take a row's end; a later one takes the place of an earlier one."""
        row = {
            "row": name,
            "date": time.strftime("%Y-%m-%d"),
            "passed": not problems,
            "problems": list(problems),
            "outcome": None if outcome is None else outcome.to_json(),
        }
        with self._lock:
            self._rows[name] = row
            self._write()

    def add_healthy(self, for_s: float, steps: int, false_positives: list[str]) -> None:
        """Take the end of training in which nothing went wrong."""
        healthy = {"seconds": for_s, "steps": steps, "false_positives": false_positives}
        with self._lock:
            self._healthy.append({"date": time.strftime("%Y-%m-%d"), **healthy})
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        rows = [self._rows[name] for name in sorted(self._rows)]
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
            f"Python {platform.python_version()}",
            "passed": sum(row["passed"] for row in rows),
            "failed": sum(not row["passed"] for row in rows),
            "healthy": self._healthy,
            "rows": rows,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(document, indent=1) + "\n")
        new.rename(self._path)
