"""The spec of a journalled job, parsed once."""

from __future__ import annotations

from functools import lru_cache

from outlast.spec import JobSpec


@lru_cache(maxsize=256)
def spec_of(spec_json: str) -> JobSpec:
    """The spec of a job, which was validated when the job was submitted."""
    return JobSpec.model_validate_json(spec_json)
