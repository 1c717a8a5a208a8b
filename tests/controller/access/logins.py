"""Logins that end while a stream is open."""

from __future__ import annotations

from typing import Any

import pytest

from controller.access import gate
from controller.access.gate import Gate
from controller.access.roles import Caller


def end_login(monkeypatch: pytest.MonkeyPatch, method: str, *, answers: int) -> list[str]:
    """The caller of a method's stream is known for so many answers, and not at the next one.

    From its next call on he is known again. What is returned has the method once that has happened.
    """
    ended: list[str] = []
    monkeypatch.setattr(gate, "AGAIN_S", 0.0)
    found = Gate._found
    looks = iter([*[True] * (1 + answers), False])

    def not_once(self: Gate, call: Any, context: Any) -> Caller | None:
        is_of_method = call.method.rpartition("/")[2] == method
        if is_of_method and not next(looks, True):
            ended.append(method)
            return None
        return found(self, call, context)

    monkeypatch.setattr(Gate, "_found", not_once)
    return ended
