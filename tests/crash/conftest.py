from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.orders import Orders


@pytest.fixture
def orders(tmp_path: Path) -> Orders:
    return Orders(tmp_path / "crash")
