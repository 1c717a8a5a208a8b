"""What a checkpoint says of its job, so that its weights can be used without the job's spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outlast.problems import SpecError
from outlast.spec.models import JobSpec
from outlast.spec.parse import accepted_spec

_KEY = "job"


def described(spec: JobSpec) -> dict[str, Any]:
    """The fields of a checkpoint that say what its weights are of."""
    parts: dict[str, Any] = {"data": {"tokens"}, "checkpoint": {"load"}}
    kept = {"model": True, "precision": True, **parts}
    return {_KEY: spec.model_dump(mode="json", include=kept)}


def saved_spec(extra: Mapping[str, Any]) -> JobSpec | None:
    """The spec as far as a checkpoint says it; None where it was saved by a version before."""
    try:
        return accepted_spec({"name": "saved", **extra[_KEY]})
    except (KeyError, TypeError, SpecError):
        return None
