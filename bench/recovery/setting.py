"""The job that everybody trains, and how the benchmark waits for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VICTIM_RANK = 1
STRIKE_AFTER_STEP = 20
DEADLINE_S = 120.0

SPEC = {
    "name": "recovery",
    "steps": 100_000,
    "model": {"layers": 4, "hidden": 192, "heads": 4, "seq_len": 128},
    "parallel": {"dp": 2, "micro_batch": 4},
    "data": {"global_batch": 8, "max_bytes": 2**20},
    "resources": {"workers_per_node": 2},
    "checkpoint": {"storage_interval_steps": 1_000_000},
    "eval": {"interval_steps": None},
}


def read_json(path: Path) -> dict[str, Any] | None:
    """A document, once it is there and whole."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return document


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Poll until `condition` gives something true; raises after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise TimeoutError(f"waited {DEADLINE_S:.0f} s for {what}")
