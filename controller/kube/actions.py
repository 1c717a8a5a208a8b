"""What the adapter does to the cluster. Each can be repeated, and each names exactly its object."""

from __future__ import annotations

from dataclasses import dataclass

from controller.kube.observed import Json
from outlast.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePod:
    """Start an agent on any host but these, in an image of jobs or, with "", in its own."""

    name: str
    avoid: tuple[NodeId, ...]
    image: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeHost:
    """Start an agent on a host in quarantine, so that checks can end the session."""

    name: str
    host: NodeId
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Delete a pod; `grace_s` 0 without waiting for its host."""

    name: str
    uid: str
    grace_s: int | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictPod:
    """Ask for a pod's eviction, which a disruption budget may refuse for a while."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelPod:
    """Say on a pod which job's workers it holds; "" for none."""

    name: str
    uid: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchHost:
    """Begin or end the quarantine of a host, if it has not changed since it was read."""

    host: NodeId
    patch: Json
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveBase:
    """Nothing is left that needs the fleet's anchor and service."""


Action = CreatePod | ProbeHost | DeletePod | EvictPod | LabelPod | PatchHost | RemoveBase
