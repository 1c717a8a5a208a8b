"""What is wrong with a request for logs."""

from __future__ import annotations

import math

from controller.core.records import JobRecord
from outlast.patterns import LinePattern
from outlast.problems import FieldProblem
from outlast.v1 import jobs_pb2


def wrong_with_logs(request: jobs_pb2.LogsRequest, job: JobRecord) -> FieldProblem | None:
    """The first field that cannot be as it is."""
    if request.HasField("rank") and not 0 <= request.rank < job.plan.world_size:
        return _problem("rank", f"is {request.rank}; allowed: 0 to {job.plan.world_size - 1}")
    if request.tail_bytes < 0:
        return _problem("tail_bytes", f"is {request.tail_bytes}; allowed: 0 or more")
    if not 0 <= request.attempt <= job.attempt:
        return _problem("attempt", f"is {request.attempt}; allowed: 1 to {job.attempt}, or 0")
    if request.attempt and request.all_attempts:
        return _problem("all_attempts", f"goes with attempt 0, and attempt is {request.attempt}")
    if not 0.0 <= request.since_s < math.inf:
        return _problem("since_s", f"is {request.since_s}; allowed: seconds since the epoch, or 0")
    try:
        LinePattern(request.grep, "grep")
    except ValueError as error:
        return _problem("grep", str(error).removeprefix("grep "))
    return None


def _problem(field: str, message: str) -> FieldProblem:
    return FieldProblem(field=field, message=message)
