"""What is raised when an invariant does not hold."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant does not hold."""


def kind_of(told: str) -> str:
    """What a violation's words say broke, without when and where."""
    return told.split(" at ")[0]
