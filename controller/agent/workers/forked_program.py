"""A program of ours that the standby process is asked to fork."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A module of ours to run in a fork."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    streams: tuple[int, int, int]
    """Descriptors for its standard input, output and error."""

    def to_json(self, module: str, *, parent: int) -> dict[str, object]:
        """What the standby reads, but for the descriptors; the fork ends when `parent` does.

        `module` is what the module is called there.
        """
        return {
            "module": module,
            "arguments": list(self.arguments),
            "environment": dict(self.environment),
            "parent": parent,
        }
