"""Generated pages say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    "script",
    [
        "make_state_diagrams",
        "make_models_reference",
        "make_spec_reference",
        "make_metrics_reference",
        "make_http_api_reference",
        "make_simulate_reference",
    ],
)
def test_page_matches_what_it_is_generated_from(script: str) -> None:
    module = loaded(script)
    assert module.PAGE.read_text() == module.page(), f"run python docs/{script}.py"


def test_diagrams_of_the_explanation_are_those_of_the_tables() -> None:
    module = loaded("make_state_diagrams")
    text = module.EXPLANATION.read_text()
    assert text.count("```mermaid") == 3
    assert text == module.explanation(), "run python docs/make_state_diagrams.py"


def loaded(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(script, DOCS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
