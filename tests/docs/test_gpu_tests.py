"""Tests that need a GPU are named where it is said what has not run."""

from __future__ import annotations

import re

from tests.controller.processes import ROOT


def test_limits_name_each_test_that_needs_a_gpu() -> None:
    files = (ROOT / "tests" / "gpu").glob("test_*.py")
    there = {
        name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    text = (ROOT / "docs" / "limits.md").read_text()
    listed = text.partition("**Tests that need a GPU**")[2].partition("\n- **")[0]
    assert set(re.findall(r"`(test_\w+)`", listed)) == there
