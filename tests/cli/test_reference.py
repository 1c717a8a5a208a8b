"""The reference page says what the command says."""

from __future__ import annotations

from tests.cli.reference import PAGE, render


def test_reference_page_is_fresh() -> None:
    assert PAGE.read_text() == render(), "run `python -m tests.cli.reference`"


def test_every_command_is_in_the_reference() -> None:
    page = PAGE.read_text()
    for command in ("up", "submit", "incidents show", "nodes drain", "demo", "agent"):
        assert f"## outlast {command}\n" in page
