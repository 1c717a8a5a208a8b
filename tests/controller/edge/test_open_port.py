"""A controller that others can reach says what that means."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controller import app
from controller.options import Options


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_address_beyond_loopback_is_explained_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, is_open: bool
) -> None:
    async def scenario() -> None:
        stop = asyncio.Event()
        options = Options(state_dir=tmp_path, grpc=f"{host}:0", http="127.0.0.1:0")
        await app.run(options, lambda running: stop.set(), stop=stop)

    asyncio.run(scenario())
    assert ("run programs on every node" in caplog.text) is is_open
