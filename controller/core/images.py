"""Images of jobs that the cluster cannot fetch: misspelt, or in a registry that is away."""

from __future__ import annotations

from controller.core import attempts
from controller.core.context import Context
from controller.core.frozen import replace
from controller.core.node_events import ImageNotPulled
from controller.core.records import NO_ATTEMPT
from controller.core.states import AWAY, JobState


def not_pulled(ctx: Context, event: ImageNotPulled) -> None:
    """Fail the jobs that wait for their first start with it, unless some node has it.

    One that has run goes on waiting: it had the right image.
    """
    nodes = ctx.state.nodes.values()
    if any(node.image == event.image and node.state not in AWAY for node in nodes):
        return
    reason = (
        f"workload.image {event.image} cannot be pulled: {event.detail}; give an image that the "
        "cluster's hosts can pull, or add a secret for its registry to the pod template"
    )
    for job in list(ctx.state.live_jobs()):
        is_first = job.attempt == NO_ATTEMPT and job.state is JobState.QUEUED
        if is_first and job.plan.need.image == event.image:
            attempts.finish(ctx, replace(job, error=reason), JobState.FAILED, reason)
