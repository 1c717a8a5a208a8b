"""What the agent gives a worker, with the job spec in it read."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache

from outlast.blackbox import Expected
from outlast.spec import JobSpec
from outlast.spec.parse import accepted_spec
from outlast.worker_contract import WorkerContract
from trainer.planning import expected_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment(WorkerContract):
    """One rank's part in one attempt of a job."""

    spec: JobSpec

    @classmethod
    def of(cls, contract: WorkerContract) -> Assignment:
        """Raises SpecError for a bad spec."""
        spec = _spec_of(contract.spec_json)
        given = {each.name: getattr(contract, each.name) for each in fields(WorkerContract)}
        return cls(**given, spec=spec)


@lru_cache(maxsize=1)
def _spec_of(text: str) -> JobSpec:
    """A spec as it was accepted. Attempts of a process that lives on have the same one."""
    return accepted_spec(json.loads(text))


@lru_cache(maxsize=1)
def expected_by(spec_json: str, stage: int, *, on_gpu: bool) -> Expected:
    """What a rank of `stage` should need; one that lives on has worked it out before."""
    return expected_of(_spec_of(spec_json), stage, on_gpu=on_gpu)
