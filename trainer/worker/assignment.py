"""What the agent gives a worker, with the job spec in it read."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from outlast.spec import JobSpec
from outlast.spec.parse import accepted_spec
from outlast.worker_contract import WorkerContract


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment(WorkerContract):
    """One rank's part in one attempt of a job."""

    spec: JobSpec

    @classmethod
    def of(cls, contract: WorkerContract) -> Assignment:
        """Raises SpecError for a bad spec."""
        spec = accepted_spec(json.loads(contract.spec_json))
        given = {each.name: getattr(contract, each.name) for each in fields(WorkerContract)}
        return cls(**given, spec=spec)
