"""The job spec: its fields. How a document is parsed into one: `outlast.spec.parse`."""

from outlast.model import ModelSpec
from outlast.spec.models import JobSpec, ParallelSpec

__all__ = ["JobSpec", "ModelSpec", "ParallelSpec"]
