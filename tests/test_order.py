"""The order in which files of tests begin, and which of them have a browser."""

from __future__ import annotations

import re

from tests.conftest import LONGEST
from tests.controller.processes import ROOT


def test_every_file_that_begins_first_is_there() -> None:
    assert [file for file in LONGEST if not (ROOT / file).exists()] == []


def test_every_file_with_a_browser_runs_where_one_is_installed() -> None:
    """Elsewhere it is skipped, and nobody would miss it."""
    listed = (ROOT / "Makefile").read_text().partition("IN_BROWSER :=")[2].partition(")")[0]
    uses = re.compile(
        r"^from tests\.web\.browser import .*\bbrowser\b|\bchromium: Any", re.MULTILINE
    )
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if uses.search(path.read_text())]
    assert files
    assert [path.name for path in files if path.name not in listed] == []
