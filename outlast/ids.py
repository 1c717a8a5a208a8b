"""Identifiers that cross process boundaries.

They are plain strings and integers on the wire; `NewType` keeps them apart in
our own code. Making one takes its randomness from the caller, so that the
simulator can replay a run exactly.
"""

from __future__ import annotations

import re
from typing import NewType

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
IncidentId = NewType("IncidentId", str)
CommandId = NewType("CommandId", str)
# One start of a job. Everything that a worker, agent or upload says carries it,
# and whatever comes from an earlier attempt is dropped.
Attempt = NewType("Attempt", int)

# A container image: host:port/name/name:tag@digest. Whether there is one only a cluster knows.
IMAGE_PATTERN = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._/:@]{0,511}")
NAME_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?")


def job_id(name: str, token: str) -> JobId:
    """A job id that is also a valid Kubernetes name: `<name>-<token>`."""
    return JobId(f"{name}-{token}")


def incident_id(job: JobId, number: int) -> IncidentId:
    """The id of a job's n-th incident, counted from 1."""
    return IncidentId(f"{job}.i{number}")
