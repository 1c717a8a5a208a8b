"""What tests in a browser share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.web.browser import browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser for all tests of a module."""
    with browser() as launched:
        yield launched


@pytest.fixture
def closed_pages(chromium: Any) -> Iterator[None]:
    """Pages that stay open follow their jobs, and each makes the next one slower."""
    yield
    for context in chromium.contexts:
        context.close()
