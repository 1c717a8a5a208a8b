"""Moments in the journal that cannot be: brought back when a controller begins.

A deadline is never further away than its own limit, and nothing that was noted is still to
come. Where the journal says so, the clock was ahead when it was written, and whoever believes
it waits for as long as it was.
"""

from __future__ import annotations

from controller.core.context import Context
from controller.core.frozen import replace
from controller.core.misfit import MAX_TIMES_OCCUPIED
from controller.core.records import JobPlan, JobRecord
from controller.core.states import JobState


def bring_back(ctx: Context) -> None:
    """Clamp what is noted of jobs and nodes to what the time allows."""
    now_s = ctx.now_s
    retry_s = ctx.settings.occupied_retry_s * 2**MAX_TIMES_OCCUPIED
    for job in list(ctx.state.jobs.values()):
        deadline_s = job.deadline_s
        if deadline_s is not None:
            deadline_s = min(deadline_s, now_s + _limit_s(ctx, job))
        recent = tuple(
            replace(span, since_s=min(span.since_s, now_s)) for span in job.account.recent
        )
        ctx.put(
            replace(
                job,
                deadline_s=deadline_s,
                since_s=min(job.since_s, now_s),
                account=replace(job.account, recent=recent),
                misfits=tuple(
                    misfit
                    if misfit.until_s is None
                    else replace(misfit, until_s=min(misfit.until_s, now_s + retry_s))
                    for misfit in job.misfits
                ),
            )
        )
    settings = ctx.settings
    longest_s = max(settings.cooldown_s, settings.suspect_s, settings.abandon_s)
    for node in list(ctx.state.nodes.values()):
        timer_s = None if node.timer_s is None else min(node.timer_s, now_s + longest_s)
        checked_s = None if node.checked_s is None else min(node.checked_s, now_s)
        ctx.put(
            replace(
                node,
                since_s=min(node.since_s, now_s),
                timer_s=timer_s,
                checked_s=checked_s,
                quarantines_s=tuple(min(began_s, now_s) for began_s in node.quarantines_s),
            )
        )


def _limit_s(ctx: Context, job: JobRecord) -> float:
    plan: JobPlan = job.plan
    match job.state:
        case JobState.PREFLIGHT:
            return plan.preflight_timeout_s
        case JobState.STARTING:
            return plan.first_step_timeout_s
        case JobState.SUSPENDING:
            return plan.stop_timeout_s
        case JobState.DIAGNOSING:
            return plan.diagnose_timeout_s
        case _:
            # For nodes, the breaker or storage: whichever is longest.
            return max(
                plan.shrink_after_s,
                plan.grow_after_s,
                plan.last_checkpoint_s,
                ctx.settings.breaker_window_s,
                ctx.settings.blind_s,
            )
