"""Conditions of hosts by which others say that something is broken there.

Whoever finds a broken device tells by a condition, and only some set a taint too.
A condition closes a host: what runs there goes on, and nothing new comes.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.kube.observed import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingCondition:
    """A condition, and the status of it that closes a host."""

    kind: str
    status: str = "True"


def parse(text: str) -> ClosingCondition:
    """What a person wrote: `KernelDeadlock`, or `AcceleratedHardwareReady=False`.

    Raises:
        ValueError: it is neither.
    """
    kind, equals, status = text.partition("=")
    if not kind or (equals and status not in ("True", "False", "Unknown")):
        raise ValueError(f"condition is {text!r}; it must be TYPE, or TYPE=True, False or Unknown")
    return ClosingCondition(kind=kind, status=status or "True")


# Of node-problem-detector, and of the monitors that AKS, EKS and Nebius run on hosts with
# devices; who has none of these never sees one.
COMMON = tuple(
    map(
        parse,
        (
            "KernelDeadlock",
            "ReadonlyFilesystem",
            "GPUMissing",
            "XIDErrors",
            "NVLinkStatusInactive",
            "NebiusGPUError",
            "AcceleratedHardwareReady=False",
        ),
    )
)


def fault_of(host: Host, closing: tuple[ClosingCondition, ...]) -> str:
    """The first condition that closes a host, in words; "" when none does."""
    for one in closing:
        found = host.conditions.get(one.kind)
        if found is not None and found.status == one.status:
            why = f" ({found.message})" if found.message else ""
            return f"its host has the condition {one.kind}={one.status}{why}"
    return ""
