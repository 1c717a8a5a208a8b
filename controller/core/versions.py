"""Versions of Outlast on the nodes of a job: its ranks need one.

What ranks say to each other has no version of its own, so those of two versions would wait for each
other until `first_step_timeout_s`. A job whose nodes differ, as in the middle of an upgrade, waits
until they do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from controller.core import nodes
from controller.core.context import Context
from controller.core.naming import names
from controller.core.records import JobRecord, NodeRecord


def in_words(ctx: Context, job: JobRecord) -> str:
    """Which of a job's nodes run which version; "" where it is one, as far as agents say."""
    held: dict[str, list[str]] = {}
    for place in job.nodes:
        if place is not None and (version := ctx.view(place).version):
            held.setdefault(version, []).append(place)
    if len(held) < 2:
        return ""
    found = sorted(held.items(), key=lambda each: -len(each[1]))
    return "; ".join(f"{names(ids)}: {version}" for version, ids in found)


def preferred(ctx: Context, job: JobRecord, free: Sequence[NodeRecord]) -> str:
    """The version that most of a job's nodes run, or else most of those that it may get; "" where
    no agent says which."""
    held = [node for place in job.nodes if (node := nodes.placed(ctx, job, place)) is not None]
    for group in (held, free):
        counted = Counter(version for node in group if (version := ctx.view(node.node).version))
        if counted:
            return min(counted, key=lambda version: (-counted[version], version))
    return ""
