"""The table of crash points is what the code has, and tests kill a process at each of them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from outlast.crashpoints import CrashPoint
from tests.crash import (
    test_agents,
    test_controllers,
    test_staging,
    test_training,
    test_uploading,
)

ROOT = Path(__file__).parents[2]
PACKAGES = ("outlast", "controller", "trainer", "checkpoint", "diagnostics", "demo")


def test_every_point_is_at_one_place_of_the_code() -> None:
    found: Counter[str] = Counter()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found.update(re.findall(r"\breach\(CrashPoint\.(\w+)\)", path.read_text()))
    assert found == Counter(list(CrashPoint.__members__))


def test_every_point_kills_a_process_in_a_test() -> None:
    """Each of these tests fails where its order was not carried out."""
    modules = (test_agents, test_controllers, test_staging, test_training, test_uploading)
    hit = Counter(point for module in modules for point in module.POINTS)
    assert hit == Counter(CrashPoint)
