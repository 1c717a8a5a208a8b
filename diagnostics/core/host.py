"""What a node's memory and disks say, and the kernel's log.

Limits are hysteretic: what is found at one level is over only at a better one, so that a
value at the limit is one finding and not a hundred.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from diagnostics.core.rules.kernel_log import KERNEL_LOG, KernelRule

LEAST_MEMORY = 0.05
ENOUGH_MEMORY = 0.10
LEAST_DISK = 0.05
ENOUGH_DISK = 0.08


class Subject(StrEnum):
    """What a finding is about."""

    MEMORY = "host_memory"
    DISK = "disk"
    KERNEL = "kernel_log"
    TRAFFIC = "traffic"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """A node as its agent sees it."""

    # Share of the memory that programs can still get; of the container's where it has less.
    memory_available: float
    # Processes killed for want of memory since the machine began.
    oom_kills: int
    # Share that is free, by folder.
    disks_free: Mapping[str, float]
    # Lines of the kernel's log since the last look that a rule knows.
    kernel: tuple[KernelLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """A line that a rule knows."""

    rule: KernelRule
    message: str


def known_lines(lines: Iterable[str]) -> tuple[KernelLine, ...]:
    """Lines of a kernel's log that some rule knows, each with what it means."""
    found = []
    for line in lines:
        rule = KERNEL_LOG.first(line)
        if rule is not None:
            means = rule.means
            which = f"class {str(means.kernel_class)!r}, {KERNEL_LOG.cite(rule.name)}"
            message = f"{means.says} ({KERNEL_LOG.name}, {which}): {line.strip()[:300]}"
            found.append(KernelLine(rule=rule, message=message))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something found on a node, or over again when `message` is empty."""

    subject: Subject
    # What of the subject: a folder, "" where there is only one.
    what: str
    message: str
    # It speaks of what runs on the node, and not against the node.
    spares_node: bool = False


class HostWatch:
    """One node, look by look."""

    def __init__(self) -> None:
        self._reported: dict[tuple[Subject, str], bool] = {}
        self._oom_kills: int | None = None

    def take(self, state: HostState) -> list[Change]:
        """What is new since the last look."""
        share = state.memory_available
        changes = self._level(
            (Subject.MEMORY, ""), share, (LEAST_MEMORY, ENOUGH_MEMORY), "of its memory is left"
        )
        for folder, free in state.disks_free.items():
            where = (Subject.DISK, folder)
            message = f"of the disk of its folder {folder!r} is free"
            changes += self._level(where, free, (LEAST_DISK, ENOUGH_DISK), message)
        before, self._oom_kills = self._oom_kills, state.oom_kills
        if before is not None and state.oom_kills > before:
            message = f"the kernel killed {state.oom_kills - before} processes for want of memory"
            changes.append(Change(subject=Subject.MEMORY, what="oom", message=message))
        for line in state.kernel:
            spares = not line.rule.means.blames_node
            changes.append(
                Change(subject=Subject.KERNEL, what="", message=line.message, spares_node=spares)
            )
        return changes

    def _level(
        self, where: tuple[Subject, str], share: float, limits: tuple[float, float], message: str
    ) -> list[Change]:
        least, enough = limits
        subject, what = where
        if share < least and not self._reported.get(where):
            self._reported[where] = True
            text = f"{share:.1%} {message} (limit {least:.0%}, ours)"
            return [Change(subject=subject, what=what, message=text)]
        if share >= enough and self._reported.pop(where, False):
            return [Change(subject=subject, what=what, message="")]
        return []
