"""The order in which files of tests begin."""

from __future__ import annotations

from tests.conftest import LONGEST
from tests.controller.processes import ROOT


def test_every_file_that_begins_first_is_there() -> None:
    assert [file for file in LONGEST if not (ROOT / file).exists()] == []
