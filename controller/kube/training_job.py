"""What a TrainingJob of the cluster asks for, and what is written back to it. Pure functions.

Its spec is that of a job, with one field more: `suspend`. It is submitted once; what is changed
later in it is of no effect but for that field, which pauses the job and lets it go on. When the
object is gone its job is cancelled.

What does not belong here: calls (`training_jobs`), and what a spec must be (the Jobs service).
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from controller.core.kinds import Wanted
from controller.core.records import JobRecord
from controller.core.states import TERMINAL, JobState
from controller.kube.observed import Json

GROUP, VERSION, KIND, PLURAL = "outlast.dev", "v1alpha1", "TrainingJob", "trainingjobs"
LABEL_FLEET = "outlast.dev/fleet"
# Who owns the jobs that are made of them: no name that a token, or a person, could have.
OWNER = "kubernetes:trainingjobs"
_SUSPEND = "suspend"
_MAX_REASON = 1024
# States of an object that has no job.
INVALID, WAITING, SUSPENDED, UNKNOWN = "INVALID", "WAITING", "SUSPENDED", "UNKNOWN"
_CONDITIONS = {
    "Running": JobState.RUNNING,
    "Succeeded": JobState.SUCCEEDED,
    "Failed": JobState.FAILED,
}
_WARNINGS = (
    INVALID,
    UNKNOWN,
    JobState.FAILED,
    JobState.SUSPENDING,
    JobState.DIAGNOSING,
    JobState.REPAIRING,
)


class Step(enum.Enum):
    """What is to be done about a TrainingJob's job."""

    SUBMIT = "submit"
    PAUSE = "pause"
    RESUME = "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One object, as far as it matters here."""

    name: str
    uid: str
    generation: int = 0
    document: Mapping[str, Any] = field(default_factory=dict)
    """The job's spec, which has the object's name unless it says another."""
    suspend: bool = False
    status: Mapping[str, Any] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    """What is to go from its status: it was written for an object that had its name before."""
    fleet: str = ""
    """Of the controller that it is for; "" is the one of the usual name."""
    digest: str = ""
    """Tells what it asks for from what was submitted."""


def read_training_job(item: Json) -> TrainingJob:
    """An object as the API server shows it.

    Nothing but its name and uid must be there: one that could not be read would seem to be gone,
    and its job be cancelled.
    """
    metadata = item["metadata"]
    spec, status = item.get("spec"), item.get("status")
    document = dict(spec) if isinstance(spec, dict) else {}
    suspend = document.pop(_SUSPEND, False)
    document = {"name": str(metadata["name"]), **document}
    text = json.dumps(document, sort_keys=True)
    uid = str(metadata["uid"])
    said = status if isinstance(status, dict) else {}
    # A write may come after the object that it is for was replaced by another of its name.
    is_its_own = said.get("uid", uid) == uid
    return TrainingJob(
        name=str(metadata["name"]),
        uid=uid,
        generation=int(metadata.get("generation") or 0),
        document=document,
        digest=hashlib.sha256(text.encode()).hexdigest()[:16],
        suspend=suspend is True,
        status=said if is_its_own else {},
        foreign=() if is_its_own else tuple(said),
        fleet=str((metadata.get("labels") or {}).get(LABEL_FLEET) or ""),
    )


def request_id(namespace: str, uid: str) -> str:
    """The request id of an object's job: submitting it again answers the job that is there."""
    return f"{request_prefix(namespace)}{uid}"


def request_prefix(namespace: str) -> str:
    """How the request ids of all jobs of a namespace's objects begin."""
    return f"trainingjob/{namespace}/"


def step_for(wanted: TrainingJob, job: JobRecord | None) -> Step | None:
    """What is to be done now; None for nothing."""
    if job is None:
        said = wanted.status
        was_refused = (said.get("state"), said.get("specDigest")) == (INVALID, wanted.digest)
        return None if wanted.suspend or was_refused or "jobId" in said else Step.SUBMIT
    if job.state in TERMINAL or job.wanted is Wanted.CANCEL or wanted.suspend == _suspended(wanted):
        return None
    # A person may have paused or resumed it: only a change of the object is followed.
    is_paused = job.wanted is Wanted.PAUSE
    if is_paused == wanted.suspend:
        return None
    return Step.PAUSE if wanted.suspend else Step.RESUME


def status_of(wanted: TrainingJob, job: JobRecord | None, now_s: float) -> Json:
    """What its status should say now."""
    if job is None:
        return _without_job(wanted, now_s)
    is_followed = (job.wanted is Wanted.PAUSE) == wanted.suspend
    is_first = "jobId" not in wanted.status
    digest = wanted.digest if is_first else wanted.status.get("specDigest", wanted.digest)
    reason = job.error.splitlines()[-1] if job.error else job.reason
    if digest != wanted.digest:
        reason += (
            "; its spec has changed since it was submitted: to run it as it is now, delete this "
            "object and apply it again"
        )
    status: Json = {
        "uid": wanted.uid,
        "observedGeneration": wanted.generation,
        "specDigest": digest,
        "jobId": job.job_id,
        "state": job.state.value,
        "reason": reason[:_MAX_REASON],
        "step": job.high_step,
        "attempt": job.attempt,
        "restarts": job.restarts,
        "nodes": job.plan.nodes,
        "suspended": wanted.suspend if is_followed else _suspended(wanted),
        "startTime": _time(job.submitted_s),
        "conditions": _conditions(wanted, job.state.value, job.reason, now_s),
    }
    if job.plan.total_steps is not None:
        status["steps"] = job.plan.total_steps
    if job.finished_s is not None:
        status["completionTime"] = _time(job.finished_s)
    return status


def refused(wanted: TrainingJob, why: str, now_s: float) -> Json:
    """The status of an object whose spec is none."""
    return {**_jobless(wanted, INVALID, why, now_s), "specDigest": wanted.digest}


def waits(wanted: TrainingJob, why: str, now_s: float) -> Json:
    """The status of an object whose job cannot be submitted yet."""
    return _jobless(wanted, WAITING, why, now_s)


def has_news(before: Mapping[str, Any], status: Json, *, is_step_due: bool) -> bool:
    """Whether a status is to be written: steps alone are, now and then."""
    changed = {key for key, value in status.items() if before.get(key) != value}
    return bool(changed if is_step_due else changed - {"step"})


def event_about(wanted: TrainingJob, namespace: str, status: Json, now_s: float) -> Json | None:
    """What `kubectl describe` shows of a new state; None where the state is as it was."""
    state = str(status["state"])
    if wanted.status.get("state") == state:
        return None
    at = _time(now_s)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{wanted.name}.", "namespace": namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": wanted.name,
            "namespace": namespace,
            "uid": wanted.uid,
        },
        "reason": state.capitalize(),
        "message": str(status["reason"]) or state,
        "type": "Warning" if state in _WARNINGS else "Normal",
        "source": {"component": "outlast-controller"},
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


def _without_job(wanted: TrainingJob, now_s: float) -> Json:
    before = wanted.status
    if "jobId" in before:
        if before.get("state") in (*(state.value for state in TERMINAL), UNKNOWN):
            # The controller keeps ended jobs for a while, and this is what it said last.
            return dict(before)
        state = UNKNOWN
        reason = (
            f"the controller does not know job {before['jobId']} any more; delete this object and "
            "apply it again to train from the beginning, or from `checkpoint.load`"
        )
        return {
            **before,
            "state": state,
            "reason": reason,
            "conditions": _conditions(wanted, state, reason, now_s),
        }
    if wanted.suspend:
        return _jobless(wanted, SUSPENDED, "spec.suspend is true", now_s) | {"suspended": True}
    return dict(before)


def _jobless(wanted: TrainingJob, state: str, reason: str, now_s: float) -> Json:
    return {
        "uid": wanted.uid,
        "observedGeneration": wanted.generation,
        "state": state,
        "reason": reason[:_MAX_REASON],
        "conditions": _conditions(wanted, state, reason, now_s),
    }


def _suspended(wanted: TrainingJob) -> bool:
    """What of `suspend` was followed last."""
    return wanted.status.get("suspended") is True


def _conditions(wanted: TrainingJob, state: str, reason: str, now_s: float) -> list[Json]:
    """What `kubectl wait` waits for; each has the time when it last changed."""
    listed = wanted.status.get("conditions")
    before = {
        each.get("type"): each
        for each in (listed if isinstance(listed, list) else ())
        if isinstance(each, dict)
    }
    found = []
    for name, of in _CONDITIONS.items():
        condition: Json = {"type": name, "status": str(state == of.value)}
        known = before.get(name)
        if known is not None and known.get("status") == condition["status"]:
            found.append(known)
            continue
        condition["reason"] = state.capitalize()
        condition["message"] = reason[:_MAX_REASON]
        condition["lastTransitionTime"] = _time(now_s)
        found.append(condition)
    return found


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(int(at_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
