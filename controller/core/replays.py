"""Steps with a non-finite loss that are done again: what comes of it tells data from hardware.

The same data on the same weights gives the same bits. So a step that is finite when it is
done again was computed wrong the first time, by one of the nodes that had a part in it; a
step that is none again is the fault of the data or the settings, and `reproducing` says what then.
"""

from __future__ import annotations

from controller.core import nodes
from controller.core.context import Context
from controller.core.effects import Alert
from controller.core.events import JobAdvanced
from controller.core.frozen import replace
from controller.core.incident_record import IncidentRecord
from controller.core.kinds import Action
from controller.core.naming import names
from controller.core.records import JobRecord
from controller.core.reproducing import bad_step
from controller.core.states import NodeState
from controller.core.verdict import PolicyVerdict, first_failure
from outlast.failures import FailureClass
from outlast.ids import NodeId
from outlast.skipped import is_skipped


def computed_on(job: JobRecord, incident: IncidentRecord) -> tuple[NodeId, ...]:
    """Nodes one of which computed a non-finite loss, or wrong bits.

    () where that is not known.
    """
    failure = first_failure(incident.evidence)
    # A gradient that is none is every rank's by the time it is looked at.
    if failure is None or failure.rank is None:
        return ()
    if failure.fault_class is FailureClass.NON_FINITE_OWN:
        return () if failure.node is None else (failure.node,)
    if failure.fault_class not in (FailureClass.NON_FINITE, FailureClass.CORRUPT):
        return ()
    holders = (job.nodes[node_index] for node_index in job.plan.model_node_indexes(failure.rank))
    return tuple(node for node in holders if node is not None)


def decided(
    ctx: Context, job: JobRecord, incident: IncidentRecord, verdict: PolicyVerdict
) -> JobRecord:
    """Note what is to be done again, and what is left out from now on."""
    if verdict.skipped is not None:
        _clear(ctx, job)
    step = bad_step(incident.evidence, incident.fault_step)
    if step is not None:
        job = ctx.put(replace(job, replayed_step=step, replayed_on=computed_on(job, incident)))
    if verdict.skipped is not None:
        job = ctx.put(replace(job, skipped=(*job.skipped, verdict.skipped)))
        ctx.emit(Alert(summary=f"job {job.job_id}: {verdict.reason}"))
    if verdict.action is Action.REPLACE_NODES:
        rest = tuple(node for node in job.unreproduced if node not in verdict.culprits)
        job = ctx.put(replace(job, unreproduced=rest))
    return job


def advanced(ctx: Context, job: JobRecord, event: JobAdvanced) -> JobRecord:
    """See whether the step with a non-finite loss has been passed, and say what that means."""
    step = job.replayed_step
    if step is None or event.completed_step < step:
        return job
    incident = ctx.incident_of(job)
    suspects = job.replayed_on
    job = ctx.put(replace(job, replayed_step=None, replayed_on=()))
    if is_skipped(job.skipped, step):
        return job
    here = [node for node in suspects if nodes.placed(ctx, job, node) is not None]
    if incident is not None:
        ctx.note(incident, "replayed", _in_words(step, suspects, still_here=bool(here)))
    unreproduced = tuple(dict.fromkeys((*job.unreproduced, *here)))
    return ctx.put(replace(job, unreproduced=unreproduced))


def _clear(ctx: Context, job: JobRecord) -> None:
    """It is the data: nothing speaks against the nodes that computed the step any more."""
    for node_id in job.replayed_on:
        node = nodes.placed(ctx, job, node_id)
        if node is not None and node.state is NodeState.SUSPECT:
            ctx.move_node(node, NodeState.ASSIGNED, f"step {job.replayed_step} reproduced")


def _in_words(step: int, suspects: tuple[NodeId, ...], *, still_here: bool) -> str:
    message = (
        f"step {step} was done again and its loss is finite now: it did not reproduce, so a device "
    )
    message += "computed wrong"
    if not suspects:
        return f"{message}; which one is not known"
    if not still_here:
        return f"{message}; {names(suspects)} had a part in it, and the job has left it"
    if len(suspects) == 1:
        return f"{message}; {suspects[0]} is suspected"
    return f"{message}; one of {names(suspects)} is suspected"
