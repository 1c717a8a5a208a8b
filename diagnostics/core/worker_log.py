"""Lines of running workers that are known, one of each kind.

What does not belong here: which lines are known (`diagnostics.core.rules.worker_log`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diagnostics.core.rules.worker_log import WORKER_LOG, WorkerRule

_MAX_WORDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A line that a rule knows."""

    rule: WorkerRule
    message: str


def known_lines(lines: Iterable[str]) -> tuple[Match, ...]:
    """Lines that some rule knows, each with what it means; the first line of each rule."""
    found: dict[str, Match] = {}
    for line in lines:
        rule = WORKER_LOG.first(line)
        if rule is not None and rule.name not in found:
            which = f"{WORKER_LOG.name}, {WORKER_LOG.cite(rule.name)}"
            message = f"{rule.means.says} ({which}): {line.strip()[:_MAX_WORDS]}"
            found[rule.name] = Match(rule=rule, message=message)
    return tuple(found.values())
