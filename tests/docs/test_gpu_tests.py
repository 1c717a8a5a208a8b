"""Tests that need a GPU are named where it is said what has not run."""

from __future__ import annotations

import re

from tests.controller.processes import ROOT


def test_limits_name_each_test_that_needs_a_gpu() -> None:
    there = {
        path.name: set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.M))
        for path in (ROOT / "tests" / "gpu").glob("test_*.py")
    }
    text = (ROOT / "docs" / "limits.md").read_text()
    section = text.partition("**Tests that need a GPU**")[2].partition("\n- **")[0]
    listed = {
        file: set(re.findall(r"`(test_\w+)`", names))
        for file, names in re.findall(r"^  - `(test_\w+\.py)`: (.*)$", section, re.M)
    }
    assert listed == there
