"""The numeric environment of each attempt, gathered from its nodes.

Equal bits are promised for an equal environment: library versions, threads per
rank, device model. An attempt that has another one than the state it resumed
from, or nodes that differ among themselves, is reported once, with its first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controller.core.records import JobRecord
from outlast.ids import Attempt, JobId, NodeId

# More differences than this explain nothing better.
MAX_CHANGES = 16


@dataclass(slots=True)
class _Reported:
    attempt: Attempt
    environments: dict[NodeId, Mapping[str, str]] = field(default_factory=dict)
    changes: dict[NodeId, tuple[str, ...]] = field(default_factory=dict)
    left_out: dict[NodeId, tuple[str, ...]] = field(default_factory=dict)
    num_samples: dict[NodeId, int] = field(default_factory=dict)


def device_in(environment: str) -> str:
    """The device's model in what `EnvironmentTable.of` said; empty if it said none."""
    items = environment.split(", ")
    named = (item.removeprefix("device ") for item in items if item.startswith("device "))
    return next(named, "")


class EnvironmentTable:
    """What the nodes of each job's newest attempt said; one entry per live job."""

    def __init__(self) -> None:
        self._reported: dict[JobId, _Reported] = {}

    def reported(
        self,
        job: JobId,
        attempt: Attempt,
        node: NodeId,
        environment: Mapping[str, str],
        changes: tuple[str, ...],
        left_out: tuple[str, ...] = (),
        *,
        num_samples: int = 0,
    ) -> None:
        """A node says what decides its bits, what of it changed, and what its data is."""
        known = self._reported.get(job)
        if known is None or known.attempt < attempt:
            known = self._reported[job] = _Reported(attempt)
        if known.attempt == attempt:
            known.environments[node] = environment
            known.changes[node] = changes
            known.left_out[node] = left_out
            known.num_samples[node] = num_samples

    def forget(self, job: JobId) -> None:
        self._reported.pop(job, None)

    def of(self, job: JobRecord) -> str:
        """The environment of the node of rank 0 in words: `device x86_64, torch 2.13.0`."""
        environment = self._environments(job).get(job.nodes[0] or NodeId(""), {})
        return ", ".join(f"{name} {environment[name]}" for name in sorted(environment))

    def left_out(self, job: JobRecord) -> tuple[str, ...]:
        """What of the data source the node of rank 0 does not read."""
        reported = self._reported.get(job.job_id)
        if reported is None or reported.attempt != job.attempt:
            return ()
        return reported.left_out.get(job.nodes[0] or NodeId(""), ())[:MAX_CHANGES]

    def num_samples(self, job: JobRecord) -> int:
        """Samples in the data of training, as the node of rank 0 says; 0: not known."""
        reported = self._reported.get(job.job_id)
        if reported is None or reported.attempt != job.attempt:
            return 0
        return reported.num_samples.get(job.nodes[0] or NodeId(""), 0)

    def changes(self, job: JobRecord) -> tuple[str, ...]:
        """What changed since the resumed state was saved, and how nodes differ, in words."""
        reported = self._reported.get(job.job_id)
        if reported is None or reported.attempt != job.attempt:
            return ()
        places = [node for node in dict.fromkeys(job.nodes) if node is not None]
        lines = [f"{node}: {line}" for node in places for line in reported.changes.get(node, ())]
        first = reported.environments.get(places[0], {}) if places else {}
        for node in places[1:]:
            lines += [
                f"{node}: {name} is {value}, and {first.get(name)} on {places[0]}"
                for name, value in sorted(reported.environments.get(node, first).items())
                if first.get(name) != value
            ]
        return tuple(lines[:MAX_CHANGES])

    def _environments(self, job: JobRecord) -> Mapping[NodeId, Mapping[str, str]]:
        reported = self._reported.get(job.job_id)
        return {} if reported is None or reported.attempt != job.attempt else reported.environments
