"""What is seen of the row's job, and of the normal one that follows it on the same fleet.

What does not belong here: what is expected of it (`expected`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from outlast.v1 import incidents_pb2
from tests.chaos.cluster import Plant
from tests.chaos.expected import SeenIncident
from tests.e2e.cluster import wait_for

TERMINAL = ("SUCCEEDED", "FAILED", "CANCELLED", "PAUSED")
ENDS_WITHIN_S = 90.0
# A silent store is given up after several tries, and only then host memory is given back.
CLOSES_WITHIN_S = 45.0
# Nodes that are free are given to a job in the turn in which it comes.
AT_ONCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A job that has ended."""

    state: str = ""
    reason: str = ""
    attempts: int = 0
    losses: Mapping[int, float]
    incidents: tuple[SeenIncident, ...] = ()

    def differing_steps(self, losses: Mapping[int, float]) -> list[int]:
        """Steps whose loss is not bitwise that of the undisturbed job."""
        return [step for step in losses if self.losses.get(step) != losses[step]]


def watch_to_the_end(plant: Plant) -> Seen:
    """Wait until the job has ended, its incidents are closed and its host memory is free."""
    wait_for(lambda: plant.job().state in TERMINAL, "the job to end", ENDS_WITHIN_S)
    job = plant.job()
    cluster = plant.cluster
    # The last upload, and what it came to, are told after the end of the job.
    deadline_s = time.monotonic() + CLOSES_WITHIN_S
    while time.monotonic() < deadline_s and not _is_settled(plant):
        time.sleep(0.1)
    return Seen(
        state=job.state,
        reason=job.reason,
        attempts=job.attempt,
        losses=cluster.losses(plant.job_id),
        incidents=tuple(_seen_incident(incident) for incident in cluster.incidents(plant.job_id)),
    )


def run_next(plant: Plant, losses: Mapping[int, float]) -> tuple[float, list[str]]:
    """Train the same job again, undisturbed; how long it was queued, and what was wrong."""
    plant.desk.give(())
    begun_s = time.monotonic()
    plant.submit_next()
    wait_for(lambda: plant.job().state != "QUEUED", "the next job to get its nodes")
    queued_s = round(time.monotonic() - begun_s, 1)
    seen = watch_to_the_end(plant)
    found = []
    if queued_s > AT_ONCE_S:
        found.append(f"waited {queued_s:.1f} s for nodes")
    if (seen.state, seen.attempts) != ("SUCCEEDED", 1):
        found.append(f"{seen.state} in attempt {seen.attempts}: {seen.reason}")
    found += [f"incident: {each.cause}: {each.reason}" for each in seen.incidents]
    if differing := seen.differing_steps(losses):
        found.append(f"losses differ from step {differing[0]}")
    return queued_s, [f"the next job: {each}" for each in found]


def _is_settled(plant: Plant) -> bool:
    """Whether incidents are closed and, the last upload being over, host memory is given back."""
    closed = all(item.state == "CLOSED" for item in plant.cluster.incidents(plant.job_id))
    try:
        return closed and not any(path.is_file() for path in plant.memory_dir.rglob("*"))
    except FileNotFoundError:
        # A folder went while it was looked into.
        return False


def _seen_incident(incident: incidents_pb2.Incident) -> SeenIncident:
    def given(name: str) -> float | None:
        return getattr(incident, name) if incident.HasField(name) else None  # type: ignore[arg-type]

    redone = given("steps_redone")
    return SeenIncident(
        cause=incident.cause,
        action=incident.action,
        reason=incident.reason,
        culprits=tuple(incident.culprit_nodes),
        detection_s=given("detection_s"),
        recovery_s=given("recovery_s"),
        steps_redone=None if redone is None else int(redone),
    )
