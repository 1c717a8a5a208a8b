"""Quarantine of a host: cordon, our own taint, and a session in annotations, as patches.

A quarantine is one merge patch with the host's resourceVersion, so that it is
there as a whole or not at all, and nothing that others write meanwhile is lost.
Its session says whose it is, and whether the host was cordoned or bore our taint
before; releasing it takes back exactly what it set. A host whose session is there
but whose cordon is not was released by a person.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from controller.kube.observed import Host, Json, Taint

TAINT = "outlast.dev/fault"
TAINT_EFFECT = "NoSchedule"
SESSION = "outlast.dev/quarantine-session"
FLEET = "outlast.dev/quarantine-fleet"
REASON = "outlast.dev/quarantine-reason"
SINCE = "outlast.dev/quarantine-since"
PRIOR_CORDON = "outlast.dev/quarantine-prior-cordon"
PRIOR_TAINT = "outlast.dev/quarantine-prior-taint"
TRIED = "outlast.dev/quarantine-tried"
_OURS = (SESSION, FLEET, REASON, SINCE, PRIOR_CORDON, PRIOR_TAINT, TRIED)
_OUR_TAINT = Taint(key=TAINT, effect=TAINT_EFFECT)
_MAX_REASON = 1_000
# The node controller's shadow of a cordon, and of a host that does not answer; conditions
# and the cordon itself tell the same.
_SHADOWS = (
    "node.kubernetes.io/unschedulable",
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """Why a host must be closed."""

    session: str
    fleet: str
    """`namespace/fleet` of the controller that wants it."""
    reason: str
    since_s: float
    """Since the Unix epoch."""


def session_of(host: Host, fleet: str) -> str:
    """The session of this fleet's quarantine of a host, "" when there is none."""
    if host.annotations.get(FLEET) != fleet:
        return ""
    return host.annotations.get(SESSION, "")


def is_anothers(host: Host, fleet: str) -> bool:
    """Whether another fleet's controller has quarantined a host."""
    return bool(host.annotations.get(SESSION)) and not session_of(host, fleet)


def human_released(host: Host, fleet: str) -> bool:
    """Whether a person has lifted this fleet's quarantine by hand, with `kubectl uncordon`.

    A taint alone that vanished proves nothing: who writes taints carelessly drops those of
    others. The cordon keeps the host closed, and the taint is not fought over.
    """
    return bool(session_of(host, fleet)) and not host.unschedulable


def quarantine_patch(host: Host, wanted: Quarantine) -> Json:
    """Close a host for everybody; a session of ours that it has already is renamed."""
    known = host.annotations if session_of(host, wanted.fleet) else {}
    taints = list(host.taints)
    # A host has one taint of a key and effect: another value of it closes the host as well.
    if not any((taint.key, taint.effect) == (TAINT, TAINT_EFFECT) for taint in taints):
        taints.append(_OUR_TAINT)
    return _patch(
        host,
        unschedulable=True,
        taints=taints,
        annotations={
            SESSION: wanted.session,
            FLEET: wanted.fleet,
            REASON: wanted.reason[:_MAX_REASON],
            SINCE: datetime.fromtimestamp(wanted.since_s, UTC).isoformat(timespec="seconds"),
            PRIOR_CORDON: known.get(PRIOR_CORDON) or _word(host.unschedulable),
            PRIOR_TAINT: known.get(PRIOR_TAINT) or _word(any(map(_is_ours, host.taints))),
        },
    )


def release_patch(host: Host) -> Json:
    """Take back what our quarantine set, and nothing else."""
    was_cordoned = host.annotations.get(PRIOR_CORDON) == _word(True)
    was_tainted = host.annotations.get(PRIOR_TAINT) == _word(True)
    return _patch(
        host,
        unschedulable=host.unschedulable and was_cordoned,
        taints=[taint for taint in host.taints if was_tainted or not _is_ours(taint)],
        annotations=dict.fromkeys(_OURS),
    )


def tried_patch(host: Host, session: str) -> Json:
    """Note on a host that an agent was sent there to end a session; the next controller knows."""
    metadata = {"resourceVersion": host.resource_version, "annotations": {TRIED: session}}
    return {"metadata": metadata}


def was_tried(host: Host, session: str) -> bool:
    """Whether an agent was ever sent there to end a session."""
    return host.annotations.get(TRIED) == session


def closed_by_others(host: Host, fleet: str, tolerations: tuple[Mapping[str, object], ...]) -> str:
    """Why somebody else wants nothing new on a host, "" when nobody minds."""
    ours = session_of(host, fleet)
    if host.unschedulable and (not ours or host.annotations.get(PRIOR_CORDON) == _word(True)):
        return "its host is cordoned"
    for taint in _foreign(host, ours, tolerations):
        return f"its host has the taint {taint.key}={taint.value}:{taint.effect}"
    return ""


def evicted_by_others(host: Host, fleet: str, tolerations: tuple[Mapping[str, object], ...]) -> str:
    """Which taint of somebody else drives our pod off a host, "" when none does."""
    for taint in _foreign(host, session_of(host, fleet), tolerations):
        if taint.effect == "NoExecute":
            return f"its host has the taint {taint.key}={taint.value}:NoExecute"
    return ""


def _foreign(host: Host, ours: str, tolerations: tuple[Mapping[str, object], ...]) -> list[Taint]:
    return [
        taint
        for taint in host.taints
        if taint.effect in ("NoSchedule", "NoExecute")
        and taint.key not in _SHADOWS
        and not (ours and _is_ours(taint) and host.annotations.get(PRIOR_TAINT) != _word(True))
        and not any(_tolerates(toleration, taint) for toleration in tolerations)
    ]


def _is_ours(taint: Taint) -> bool:
    """Whether a taint is the one that we set, or the same; others may use its key as well."""
    return (taint.key, taint.effect, taint.value) == (TAINT, TAINT_EFFECT, "")


def _word(is_so: bool) -> str:
    return "true" if is_so else "false"


def _tolerates(toleration: Mapping[str, object], taint: Taint) -> bool:
    """Kubernetes' own rule; an empty key or effect matches all of them."""
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    if toleration.get("key") not in (None, "", taint.key):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return (toleration.get("value") or "") == taint.value


def _patch(
    host: Host,
    *,
    unschedulable: bool,
    taints: list[Taint],
    annotations: Mapping[str, str | None],
) -> Json:
    return {
        "metadata": {
            "resourceVersion": host.resource_version,
            "annotations": dict(annotations),
        },
        # Null removes a key, as the API server itself does with a cordon that is lifted.
        "spec": {
            "unschedulable": unschedulable or None,
            "taints": [_taint(taint) for taint in taints] or None,
        },
    }


def _taint(taint: Taint) -> Json:
    document = {"key": taint.key, "effect": taint.effect}
    if taint.value:
        document["value"] = taint.value
    if taint.time_added:
        document["timeAdded"] = taint.time_added
    return document
