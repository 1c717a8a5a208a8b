"""Generated pages say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    "script",
    [
        "make_state_diagrams",
        "make_spec_reference",
        "make_metrics_reference",
        "make_simulate_reference",
    ],
)
def test_page_matches_what_it_is_generated_from(script: str) -> None:
    spec = importlib.util.spec_from_file_location(script, DOCS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), f"run python docs/{script}.py"
