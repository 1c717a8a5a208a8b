"""A session that fails while it is welcomed leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller.core.edge.edge import Edge
from outlast.ids import NodeId
from tests.controller.edge.bench import Bench, Stream, bench


async def _until(found: Bench, condition: Callable[[], bool], what: str) -> None:
    for _ in range(50_000):
        if condition():
            return
        if found.loop.done():
            found.loop.result()
        await asyncio.sleep(0)
    raise AssertionError(f"never happened: {what}")


def test_session_that_fails_while_it_is_welcomed_is_not_connected_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was: its node counted as connected, and nobody was at the other end."""
    handle = Edge.handle

    def mistaken(self: Edge, node: NodeId, *arguments: Any) -> object:
        if node == "n9":
            raise KeyError("our own mistake")
        return handle(self, node, *arguments)

    async def scenario() -> None:
        async with bench(tmp_path) as found:
            await _until(found, lambda: len(found.sessions) == 3, "the others are connected")
            monkeypatch.setattr(Edge, "handle", mistaken)
            stream = Stream(found, "n9")
            await _until(found, stream.has_ended, "its call ends with the mistake")
            with pytest.raises(KeyError, match="our own mistake"):
                await stream.wait()
            assert "n9" not in found.sessions.nodes()
            assert not found.loop.done()
            monkeypatch.undo()
            # The next one is welcome, of the same agent too.
            found.connect("n9")
            await _until(
                found,
                lambda: found.sessions.is_connected("n9") and "n9" in found.service.state.nodes,  # type: ignore[arg-type, comparison-overlap]
                "it joins",
            )

    asyncio.run(scenario())
