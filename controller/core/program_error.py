"""Mistakes of the job's own program or settings: where a retry could only repeat them.

What does not belong here: starts that an agent refuses (`policy`), and jobs that ask for more
than nodes have (`misfit`).
"""

from __future__ import annotations

import re

from controller.core.records import Action, Cause, Evidence, EvidenceKind
from controller.core.verdict import Facts, Verdict, root_failure

# What decided a class is for those who look into an incident; see `diagnostics.core.exits`.
_SOURCE = re.compile(r" \([a-z' ]+, class '[a-z_]+', rule '[^']+' of table \d+\)")


def plain(detail: str) -> str:
    """What happened, without the rule of the table that gave it its class."""
    return _SOURCE.sub("", detail)


def when(fault_step: int) -> str:
    """How far training was."""
    return "before the first step" if fault_step < 1 else f"after step {fault_step}"


def decide(facts: Facts) -> Verdict | None:
    """An exception of the program before the job has ever completed a step.

    The same program on the same input would raise it again. Later it may be a matter of one
    batch or moment: such a failure is tried once more, in `policy`.
    """
    root = root_failure(facts.evidence)
    if root is None or not _is_certain(root):
        return None
    has_trained = facts.fault_step >= 1 or facts.last_fault_step >= 1 or facts.committed_step
    if has_trained:
        return None
    return Verdict(
        action=Action.FAIL,
        cause=Cause.USER_ERROR,
        reason=f"the job's own program failed before the first step, on rank {root.rank}: "
        f"{plain(root.detail)}; it would fail again, so it is not retried",
        fingerprint=root.fingerprint,
        error=root.traceback or plain(root.detail),
    )


def _is_certain(root: Evidence) -> bool:
    """Whether an exception of the interpreter says that it is the program."""
    is_exit = root.kind is EvidenceKind.WORKER_EXIT
    return is_exit and root.fault_class == "user_error" and root.fingerprint != ""
