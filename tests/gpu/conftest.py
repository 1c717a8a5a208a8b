"""Tests that only a GPU can answer. Without one each is skipped, with the command that runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device; `make test-gpu` runs it where there is one")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
