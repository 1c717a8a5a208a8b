"""A node's own history of healthy values: what it can do when nothing is wrong.

Laptops and mixed fleets have no vendor table, so a node is compared with
itself. The history holds healthy values only, and only the newest of them, so
that a slow decline does not become the norm at once and a repaired node does
not stay accused for ever.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

FORMAT_VERSION = 1
# Two values cannot outvote a lucky or an unlucky one; three can.
MIN_RUNS = 3
# About a fortnight of daily preflights: long enough to be steady, short enough
# to follow a driver or kernel update that its key does not show.
KEEP_RUNS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Healthy values by baseline key, oldest first."""

    runs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def num_runs(self, key: str) -> int:
        """How many healthy values are kept under `key`."""
        return len(self.runs.get(key, ()))

    def expected(self, key: str) -> float | None:
        """The median healthy value; None while there are fewer than `MIN_RUNS`."""
        values = self.runs.get(key, ())
        return statistics.median(values) if len(values) >= MIN_RUNS else None

    def with_run(self, key: str, value: float) -> Baseline:
        """This baseline plus one healthy value."""
        values = (*self.runs.get(key, ()), value)[-KEEP_RUNS:]
        return Baseline(runs={**self.runs, key: values})

    def to_json(self) -> str:
        """The text of a baseline file."""
        return json.dumps({"version": FORMAT_VERSION, "runs": self.runs}, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Baseline:
        """The baseline in a file's text.

        Raises:
            ValueError: not a baseline file of this version.
        """
        raw: object = json.loads(text)
        if not isinstance(raw, dict) or raw.get("version") != FORMAT_VERSION:
            raise ValueError(f"not a baseline file of version {FORMAT_VERSION}")
        runs: object = raw.get("runs")
        if not isinstance(runs, dict):
            raise ValueError("baseline file: `runs` is not an object")
        return Baseline(runs={str(key): _values(key, found) for key, found in runs.items()})


def _values(key: object, found: object) -> tuple[float, ...]:
    if not isinstance(found, list):
        raise ValueError(f"baseline file: runs of {key} are not a list")
    values = []
    for value in found:
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"baseline file: {value!r} among the runs of {key}")
        values.append(float(value))
    return tuple(values[-KEEP_RUNS:])
