"""Bugs that more than one test plants in the machine."""

from __future__ import annotations

import pytest

from controller.core import losses
from controller.core.context import Context
from controller.core.node_events import NodeLate, NodeSilent


def lose_nodes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is lost after a silence of a few seconds."""

    def trigger_happy(ctx: Context, event: NodeLate) -> None:
        losses.silent(ctx, NodeSilent(node=event.node, silent_s=event.silent_s))

    monkeypatch.setattr(losses, "late", trigger_happy)
