"""Counters of a machine since it booted, and what has risen since the last look.

A total since boot says little: links go down while a rack is being cabled. What
counts is what happens between two checks, so each check leaves what it saw.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Counters by name at one moment of one boot."""

    boot_id: str
    at_s: float
    counters: Mapping[str, int] = field(default_factory=dict)
    # Of the network, that were up at this check or an earlier one, of any boot.
    used_ports: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The text of a counters file."""
        return json.dumps(
            {
                "version": FORMAT_VERSION,
                "boot_id": self.boot_id,
                "at_s": self.at_s,
                "counters": dict(self.counters),
                "used_ports": list(self.used_ports),
            },
            sort_keys=True,
        )

    @staticmethod
    def from_json(text: str) -> Snapshot:
        """The snapshot in a file's text.

        Raises:
            ValueError: not a counters file of this version.
        """
        raw: object = json.loads(text)
        if not isinstance(raw, dict) or raw.get("version") != FORMAT_VERSION:
            raise ValueError(f"not a counters file of version {FORMAT_VERSION}")
        try:
            counters = {str(name): int(value) for name, value in raw["counters"].items()}
            boot_id, at_s = str(raw["boot_id"]), float(raw["at_s"])
            used_ports = tuple(str(port) for port in raw.get("used_ports", ()))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"counters file: {error!r}") from error
        return Snapshot(boot_id=boot_id, at_s=at_s, counters=counters, used_ports=used_ports)


def risen(before: Snapshot | None, now: Snapshot, name: str) -> int | None:
    """By how much a counter rose; None where there is nothing to compare with.

    After a reboot, or a reload of a driver that resets its counters, there is not.
    """
    if before is None or before.boot_id != now.boot_id or name not in before.counters:
        return None
    difference = now.counters[name] - before.counters[name]
    return difference if difference >= 0 else None
