"""Modules for frameworks, under plain Python and without the framework."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

HUGGING_FACE = "outlast.integrations.hugging_face"


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        (HUGGING_FACE, "transformers", "hf"),
        ("outlast.integrations.lightning", "lightning", "lightning"),
    ],
)
def test_a_framework_that_is_missing_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, module: str, library: str, extra: str
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    # Parts that another test has imported would be found without the library.
    parts = [part for part in sys.modules if part.startswith(f"{library}.")]
    for part in [library, *parts]:
        monkeypatch.setitem(sys.modules, part, None)
    with pytest.raises(ImportError, match=rf"pip install 'outlast\[{extra}\]'"):
        importlib.import_module(module)


def test_a_trainer_is_left_alone_under_plain_python() -> None:
    hugging_face = pytest.importorskip(HUGGING_FACE)
    trainer = SimpleNamespace()
    hugging_face.use_session(trainer)
    assert vars(trainer) == {}
    with pytest.raises(ValueError, match="every_steps=0; allowed: 1 and more"):
        hugging_face.use_session(trainer, every_steps=0)
