"""A session within a test's own process: a `Trainer` of a framework after another goes on from it.

States are taken apart and brought back as they are in host memory. There is one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from outlast import session
from outlast.session.objects import Objects


class FaultError(Exception):
    """What ends a training in the midst of it."""


@dataclass(slots=True)
class HostMemory:
    """What is saved, and what was reported."""

    saved_steps: list[int] = field(default_factory=list)
    losses: dict[int, float | None] = field(default_factory=dict)
    stop_at: int = -1
    """The save with which ranks know that they are asked to stop; never: -1."""
    _state: tuple[str, bytes, dict[str, Tensor]] | None = None

    def reset(self) -> None:
        """Forget all."""
        self.saved_steps, self.losses, self._state = [], {}, None

    def save(self, objects: Objects, step: int) -> None:
        flat = objects.flatten()
        tensors = {name: each.clone() for name, each in flat.tensors.items()}
        self._state = flat.text, bytes(flat.inline), tensors
        self.saved_steps.append(step)

    def restore(self, objects: Objects) -> int:
        if self._state is None:
            return 0
        text, inline, tensors = self._state
        objects.load(text, inline, lambda name, shape, dtype: tensors[name].clone())
        return self.saved_steps[-1]

    def change(self, before: str, after: str) -> None:
        """Change what was saved: the text of it."""
        assert self._state is not None
        text, *rest = self._state
        assert text.count(before) == 1, text
        self._state = (text.replace(before, after), *rest)  # type: ignore[assignment]

    @property
    def text_bytes(self) -> int:
        """How large the text of a state is."""
        assert self._state is not None
        return len(self._state[0])

    def should_stop(self) -> bool:
        return bool(self.saved_steps) and 0 <= self.stop_at <= self.saved_steps[-1]

    def step(self, step: int, *, loss: float | None = None, **_: Any) -> None:
        assert step not in self.losses or loss is None or self.losses[step] in (None, loss)
        self.losses[step] = loss


class _Checkpoint:
    def __init__(self, memory: HostMemory, objects: Objects) -> None:
        self._memory = memory
        self._objects = objects

    def restore(self) -> int:
        return self._memory.restore(self._objects)

    def save(self, step: int) -> None:
        self._memory.save(self._objects, step)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    """The session of this test."""
    memory = HostMemory()
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "should_stop", memory.should_stop)
    monkeypatch.setattr(session, "step", memory.step)
    monkeypatch.setattr(session, "checkpoint", lambda **given: _Checkpoint(memory, Objects(given)))
    return memory
