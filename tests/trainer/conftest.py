"""One warm process for all multi-rank tests of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
