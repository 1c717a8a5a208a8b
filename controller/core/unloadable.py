"""The verdict where checkpoints were committed and none of them can be loaded.

The same bytes are as damaged at the next try, and to begin anew would give up what may be
repaired: so the job waits for a person at once, whatever its ladder of recovery says.
"""

from __future__ import annotations

from controller.core.incident_record import Evidence
from controller.core.kinds import Action, Cause, EvidenceKind
from controller.core.program_error import plain
from controller.core.verdict import PolicyInput, PolicyVerdict, first_failure
from outlast.failures import FailureClass

_ERROR = "checkpoint.core.errors.NoCheckpointError: "
_ADVICE = (
    "repair or bring back what is damaged (`outlast ckpt verify JOB` lists it; `outlast ckpt "
    "salvage JOB -o FOLDER` saves the rest) and resume the job, or begin elsewhere: `outlast "
    "resume JOB --checkpoint STEP` or URL, or `--from-scratch`"
)


def decide(facts: PolicyInput) -> PolicyVerdict | None:
    """Wait for a person, with the damaged file named."""
    failure = first_failure(facts.evidence)
    if failure is None or failure.fault_class is not FailureClass.CHECKPOINT:
        return None
    what = plain(_most_telling(facts, failure).detail).removeprefix(_ERROR)
    return PolicyVerdict(
        action=Action.PAUSE,
        cause=Cause.CHECKPOINT,
        reason=f"{what}; {_ADVICE}",
        fingerprint=failure.fingerprint,
        error=failure.traceback or what,
        # Nothing is tried, and nothing has failed but the file.
        spends_retry=False,
    )


def _most_telling(facts: PolicyInput, failure: Evidence) -> Evidence:
    """A rank that read the damaged bytes itself, if one is known."""
    direct = (
        item
        for item in facts.evidence
        if item.kind is EvidenceKind.WORKER_EXIT
        and item.fault_class is FailureClass.CHECKPOINT
        and "on another rank" not in item.detail
    )
    return next(direct, failure)
