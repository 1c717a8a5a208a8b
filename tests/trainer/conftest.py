"""One warm process for all multi-rank tests of the session, and folders for two runs of a job."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.ranks import RankPool
from tests.trainer.resuming import make_text


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """One for a whole run and one for it in pieces, with the text that both read beside them."""
    make_text(tmp_path)
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    whole.mkdir()
    pieces.mkdir()
    yield whole, pieces
    shutil.rmtree(tmp_path)
