"""Quarantine of a host: cordon, our own taint, and a session in annotations, as patches.

A quarantine is one merge patch with the host's resourceVersion, so that it is
there as a whole or not at all, and nothing that others write meanwhile is lost.
Its session says whose it is and whether the host was cordoned before; releasing
it takes back exactly what it set. A host whose session is there but whose
cordon is not was released by a person.
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
_OURS = (SESSION, FLEET, REASON, SINCE, PRIOR_CORDON)
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
    prior = host.annotations.get(PRIOR_CORDON) if session_of(host, wanted.fleet) else None
    if prior is None:
        prior = "true" if host.unschedulable else "false"
    taints = [taint for taint in host.taints if taint.key != TAINT]
    taints.append(Taint(key=TAINT, effect=TAINT_EFFECT))
    return _patch(
        host,
        unschedulable=True,
        taints=taints,
        annotations={
            SESSION: wanted.session,
            FLEET: wanted.fleet,
            REASON: wanted.reason[:_MAX_REASON],
            SINCE: datetime.fromtimestamp(wanted.since_s, UTC).isoformat(timespec="seconds"),
            PRIOR_CORDON: prior,
        },
    )


def release_patch(host: Host) -> Json:
    """Take back what our quarantine set, and nothing else."""
    was_cordoned = host.annotations.get(PRIOR_CORDON) == "true"
    return _patch(
        host,
        unschedulable=host.unschedulable and was_cordoned,
        taints=[taint for taint in host.taints if taint.key != TAINT],
        annotations=dict.fromkeys(_OURS),
    )


def closed_by_others(host: Host, fleet: str, tolerations: tuple[Mapping[str, object], ...]) -> str:
    """Why somebody else wants nothing new on a host, "" when nobody minds."""
    ours = session_of(host, fleet)
    if host.unschedulable and (not ours or host.annotations.get(PRIOR_CORDON) == "true"):
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
        and not (ours and taint.key == TAINT)
        and not any(_tolerates(toleration, taint) for toleration in tolerations)
    ]


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
