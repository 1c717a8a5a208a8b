"""What is raised when an invariant does not hold."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant does not hold."""


def kind_of(message: str) -> str:
    """What a violation's words say broke, without when and where."""
    return message.split(" at ")[0]
