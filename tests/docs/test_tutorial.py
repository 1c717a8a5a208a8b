"""The tutorial shows the tables and words that the commands print today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outlast.cli import checkpoints, describe, fleet, incidents, jobs
from tests.cli.running import outlast

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
HEADERS = {
    "NODE": fleet._NODE_HEADER,
    "JOB": jobs._HEADER,
    "INCIDENT": incidents._HEADER,
    "STEP": checkpoints._HEADER,
}


@pytest.mark.parametrize("first", list(HEADERS))
def test_tables_have_the_columns_of_their_commands(first: str) -> None:
    shown = re.findall(rf"^{first}  .*$", PAGE, re.MULTILINE)
    # Checks of nodes have a table of their own.
    shown = [line for line in shown if "VERDICT" not in line]
    assert shown
    for line in shown:
        columns = re.split(r" {2,}", line)
        known = [name for name in HEADERS[first] if name in columns]
        # A column in which no row has anything is left out.
        assert columns == known


def test_sentences_about_a_job_are_those_of_status() -> None:
    shown = re.findall(r"^It (?:is|has|was) .*$", PAGE, re.MULTILINE)
    assert shown
    assert set(shown) <= set(describe._MEANING.values())


def test_the_plan_is_what_the_command_prints(tmp_path: Path) -> None:
    found = re.search(r"^\$ outlast plan examples/gpt-tiny.yaml\n(.*?)^```", PAGE, re.M | re.S)
    assert found
    spec = str(ROOT / "examples" / "gpt-tiny.yaml")
    done = outlast("plan", spec, "--state-dir", str(tmp_path), COLUMNS="80")
    assert set(found[1].splitlines()) <= {*done.stdout.splitlines(), "..."}


def test_what_is_shown_fits_80_columns() -> None:
    """But for commands, which a terminal wraps, and messages that name fields."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    long = [line for line in lines if len(line) > 80 and not line.startswith(("$ ", "  "))]
    assert not long
