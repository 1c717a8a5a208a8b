"""An attempt of a job: filling its places, starting, stopping and ending it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import assert_never

from controller.core import copies, incidents, misfit, nodes, searching, spares, topology, versions
from controller.core.attempt_record import AttemptRecord
from controller.core.changes import AttemptPut
from controller.core.context import Context
from controller.core.events import CheckpointFailed, CommandFinished
from controller.core.frozen import replace
from controller.core.incident_record import Evidence
from controller.core.kinds import EvidenceKind
from controller.core.naming import names
from controller.core.orders import CommandRecord, ForgetJob, RunSuite, StartWorkers, StopWorkers
from controller.core.records import NO_ATTEMPT, JobRecord, NodeRecord
from controller.core.states import AWAY, EXCLUDED, JobState, NodeState
from outlast.failures import ErrorKind, FailureClass
from outlast.ids import Attempt, CommandId, NodeId


def fill_places(ctx: Context, job: JobRecord, kept: frozenset[NodeId] = frozenset()) -> JobRecord:
    """Put free nodes into free places, but for those that are `kept` for others; a node that the
    job had gets its own back. All of them are to be checked first, but for ready standbys."""
    free = {node.node: node for node in nodes.free_nodes(ctx, job) if node.node not in kept}
    ready = {node.node for node in free.values() if spares.is_ready(ctx, job, node)}
    places: list[NodeId | None] = []
    unchecked = [node for node in job.unchecked if nodes.placed(ctx, job, node) is not None]
    for node_id in job.nodes:
        node = nodes.placed(ctx, job, node_id)
        if node is not None and node.state is NodeState.DRAINING:
            ctx.move_node(replace(node, job=None), NodeState.DRAINED, "drained by a person")
            node = None
        is_back = node is None and node_id in free
        if is_back and node_id is not None:
            _place(ctx, job, free.pop(node_id))
            unchecked.append(node_id)
        places.append(node_id if node is not None or is_back else None)
    for place, chosen in list(_chosen(ctx, job, places, [*free.values()], ready)):
        _place(ctx, job, free.pop(chosen))
        places[place] = chosen
        unchecked.append(chosen)
    unchecked = [node for node in unchecked if job.plan.preflight and node not in ready]
    return ctx.put(replace(job, nodes=tuple(places), unchecked=tuple(unchecked)))


def _chosen(
    ctx: Context,
    job: JobRecord,
    places: Sequence[NodeId | None],
    free: Sequence[NodeRecord],
    ready: Set[NodeId],
) -> Iterator[tuple[int, NodeId]]:
    """Which free nodes take which of the places that are free, as far as there are any."""
    left = [place for place, node_id in enumerate(places) if node_id is None]
    if not left or not free:
        return
    paths = [_path_at(ctx, node_id) for node_id in places]
    held = [path for path in paths if path]
    wanted: list[topology.Path] = []
    before: topology.Path = ()
    for place, path in enumerate(paths):
        before = path or before
        if places[place] is None:
            # The node that was here before says best where the next should stand, if it is known.
            lost = _path_at(ctx, job.nodes[place]) if job.attempt > NO_ATTEMPT else ()
            wanted.append(lost or before or next(iter(held), ()))
    classes: list[list[tuple[NodeId, topology.Path]]] = [[] for _ in range(6)]
    version = versions.preferred(ctx, job, free)
    for node in free:
        # It is stopped: nodes that need no check come first.
        kind = 0 if node.node in ready else 1 if node.state is NodeState.STANDBY else 2
        # With another version it does not start.
        others = 3 if ctx.view(node.node).version not in ("", version) else 0
        classes[others + (kind if job.attempt > NO_ATTEMPT else 0)].append((node.node, node.path))
    for place, chosen in zip(left, topology.choose(wanted, classes), strict=True):
        if chosen is not None:
            yield place, chosen


def _path_at(ctx: Context, node_id: NodeId | None) -> topology.Path:
    node = None if node_id is None else ctx.state.nodes.get(node_id)
    return () if node is None else node.path


def start(ctx: Context, job: JobRecord, reason: str) -> None:
    """Issue the next attempt."""
    places = tuple(node for node in job.nodes if node is not None)
    assert len(places) == job.plan.nodes, f"job {job.job_id} starts on {len(places)} nodes"
    attempt, last = Attempt(job.attempt + 1), job
    job = ctx.move_job(
        replace(
            job,
            attempt=attempt,
            stalled_s=0.0,
            resumed_step=None,
            grow_step=None,
            yields_to=None,
            lacking=(),
            held_by=tuple(dict.fromkeys((*job.held_by, *places))),
            restarts=job.restarts + (job.attempt > NO_ATTEMPT),
        ),
        JobState.STARTING,
        reason,
        deadline_s=ctx.now_s + job.plan.first_step_timeout_s,
    )
    record = _record_of(ctx, job, places)
    before, incident = ctx.state.attempts.get(job.job_id), ctx.incident_of(last)
    # Without a fault of that attempt it is not known how far it came.
    is_its_own = incident is not None and incident.attempt == last.attempt
    step = incident.fault_step if incident is not None and is_its_own else -1
    ctx.record(AttemptPut(attempt=copies.with_new_nodes(record, last, before, step)))
    for node_id in places:
        ctx.open_command(
            CommandId(f"{job.job_id}/a{attempt}/start/{node_id}"),
            node_id,
            StartWorkers(),
            job=job.job_id,
            attempt=attempt,
        )


def _record_of(ctx: Context, job: JobRecord, places: tuple[NodeId, ...]) -> AttemptRecord:
    """What all nodes of an attempt receive; the first one hosts the rendezvous."""
    nodes_of_job = [ctx.state.nodes[node_id] for node_id in places]
    first, before = nodes_of_job[0], ctx.state.attempts.get(job.job_id)
    return AttemptRecord(
        job=job.job_id,
        attempt=job.attempt,
        nodes=places,
        workers_per_node=job.plan.workers_per_node,
        rendezvous_host=first.address,
        rendezvous_port=first.rendezvous_port,
        committed_step=-1 if job.committed_step is None else job.committed_step,
        spec_json=job.spec_json,
        checkpoint_url=job.checkpoint_url,
        owner=job.mark,
        skipped=job.skipped,
        replayed_step=job.replayed_step,
        suspects=job.replayed_on,
        chosen=job.chosen,
        replica_shift=copies.replica_shift(job, nodes_of_job, before),
    )


def waits_for_storage(ctx: Context, event: CheckpointFailed) -> None:
    """A node cannot start its ranks before the job's storage answers, and asks it again."""
    job = ctx.state.jobs.get(event.job_id)
    if job is not None and job.state is JobState.STARTING and event.node in job.nodes:
        ctx.explain(job, f"{event.node} waits for storage before ranks start: {event.detail}")


def away(ctx: Context, job: JobRecord) -> tuple[NodeId, ...]:
    """Nodes of a job whose agents are not connected, or are about to leave.

    An order to start would reach one at best when the others have given up, and the port of a
    rendezvous there is that of an agent which may be gone.
    """
    held = (node for place in job.nodes if (node := nodes.placed(ctx, job, place)) is not None)
    return tuple(node.node for node in held if node.has_left or not ctx.connected(node.node))


def suspend(
    ctx: Context,
    job: JobRecord,
    reason: str,
    *,
    graceful: bool,
    capture_stacks: bool = False,
    keep: bool = False,
) -> None:
    """Stop every worker of the present attempt; with `keep`, the processes that can live on do."""
    job = ctx.move_job(
        job,
        JobState.SUSPENDING,
        f"stopping workers: {reason}",
        deadline_s=ctx.now_s + job.plan.stop_timeout_s,
    )
    close_starts(ctx, job)
    order = StopWorkers(
        graceful=graceful,
        timeout_s=job.plan.stop_timeout_s / 2,
        capture_stacks=capture_stacks,
        keep=keep,
    )
    _stop(ctx, job, order)


def end_kept(ctx: Context, job: JobRecord) -> None:
    """End the processes that a stop has kept: no start of their ranks will come soon."""
    if job.plan.heals:
        _stop(ctx, job, StopWorkers(graceful=False, timeout_s=job.plan.stop_timeout_s / 2))


def _stop(ctx: Context, job: JobRecord, order: StopWorkers) -> None:
    for node_id in job.nodes:
        node = nodes.placed(ctx, job, node_id)
        if node is not None and not node.has_left:
            # The job does not go on where it drains.
            keep = order.keep and node.state is not NodeState.DRAINING
            # An agent answers a command that it has done without doing it again, and a stop that
            # keeps processes does not end them.
            word = "leave" if keep else "stop"
            ctx.open_command(
                CommandId(f"{job.job_id}/a{job.attempt}/{word}/{node.node}"),
                node.node,
                replace(order, keep=keep),
                job=job.job_id,
                attempt=job.attempt,
            )


def is_stopping(ctx: Context, job: JobRecord) -> bool:
    """Whether some stop order's answer still matters; asked after each of thousands of them."""
    return next(stops_pending(ctx, job), None) is not None


def stops_pending(ctx: Context, job: JobRecord) -> Iterator[CommandRecord]:
    """Stop orders whose answer still matters: their node is not known to be lost."""
    incident = ctx.incident_of(job)
    evidence = () if incident is None else incident.evidence
    out_of_reach = {
        item.node
        for item in evidence
        if item.kind in (EvidenceKind.NODE_LOST, EvidenceKind.NOT_STOPPED)
    }
    for command_id in ctx.state.index.of_job.get((StopWorkers, job.job_id), ()):
        command = ctx.state.commands[command_id]
        if (
            command.attempt == job.attempt
            and command.node not in out_of_reach
            and ctx.state.nodes[command.node].state not in EXCLUDED
        ):
            yield command


def finish(ctx: Context, job: JobRecord, state: JobState, reason: str) -> None:
    close_starts(ctx, job)
    close_checks(ctx, job, reason)
    job = incidents.close_for(ctx, job, reason)
    job = ctx.move_job(
        replace(job, finished_s=ctx.now_s, unchecked=(), yields_to=None), state, reason
    )
    for node_id in job.held_by:
        forget_on(ctx, job, node_id)
    release_nodes(ctx, job)


def forget_on(ctx: Context, job: JobRecord, node_id: NodeId) -> None:
    """Free what an ended job still holds on a node, now or when the node is back."""
    node = ctx.state.nodes.get(node_id)
    # A node that was given up may come back all the same; it gets the order when it joins.
    if node is not None and (node.state not in AWAY or ctx.connected(node_id)):
        ctx.open_command(
            CommandId(f"{job.job_id}/forget/{node_id}"),
            node_id,
            ForgetJob(),
            job=job.job_id,
            attempt=job.attempt,
        )


def pause(ctx: Context, job: JobRecord, why: str) -> None:
    close_checks(ctx, job, why)
    job = incidents.close_for(ctx, job, why)
    how = f"`outlast resume {job.job_id}` continues it"
    if len(ctx.state.done.get(job.job_id, {})) == job.plan.world_size:
        # The workers have ended: what they made is in host memory, and nowhere else.
        how = (
            "its state is kept in the host memory of its nodes: make room, and "
            f"`outlast ckpt push {job.job_id}` uploads it (--to URL: elsewhere)"
        )
    job = replace(job, grow_step=None, yields_to=None)
    job = ctx.move_job(job, JobState.PAUSED, f"{why}; {how}")
    release_nodes(ctx, job)


def exclude(ctx: Context, job: JobRecord, node: NodeRecord, reason: str) -> None:
    """Keep a node that is not fit for use from a job that has not started there."""
    nodes.keep_out(ctx, node, reason)
    incident = ctx.incident_of(job)
    if incident is not None:
        ctx.add_evidence(incident, sign(ctx, EvidenceKind.DIAGNOSTICS, node.node, reason))


def preflight_timed_out(ctx: Context, job: JobRecord) -> None:
    """Go on without the nodes whose checks are not done in time.

    A job that allows less than the fleet does says nothing of them: they are free for others.
    """
    if job.plan.preflight_timeout_s < ctx.settings.fleet_check_timeout_s:
        _leave_unchecked(ctx, job)
        return
    for node_id in job.unchecked:
        node = nodes.placed(ctx, job, node_id)
        if node is not None:
            exclude(ctx, job, node, "did not finish its preflight in time")
    job = ctx.state.jobs[job.job_id]
    if job.state is JobState.PREFLIGHT and job.deadline_s is not None:
        ctx.put(replace(job, deadline_s=max(nodes.breaker_opens_s(ctx), ctx.now_s + 1.0)))


def _leave_unchecked(ctx: Context, job: JobRecord) -> None:
    limit_s = job.plan.preflight_timeout_s
    detail = f"its checks took longer than recovery.preflight_timeout_s, {limit_s:g} s"
    late = [node for node in job.unchecked if nodes.placed(ctx, job, node) is not None]
    for node_id in late:
        for command in ctx.commands_of(RunSuite, node=node_id, job=job.job_id):
            ctx.close_command(command.command_id, f"job {job.job_id} no longer waits for it")
    signs = (sign(ctx, EvidenceKind.START_FAILED, node, detail) for node in late)
    evidence = tuple(replace(item, fault_class=FailureClass.OCCUPIED) for item in signs)
    job = misfit.leave(ctx, job, evidence)
    ctx.move_job(job, JobState.PROVISIONING, f"without {names(late)}: {detail}")


def close_starts(ctx: Context, job: JobRecord) -> None:
    for command in ctx.commands_of(StartWorkers, job=job.job_id):
        ctx.close_command(command.command_id, f"the job is {job.state}")


def sign(ctx: Context, kind: EvidenceKind, node: NodeId | None, detail: str) -> Evidence:
    return Evidence(kind=kind, node=node, rank=None, detail=detail, at_s=ctx.now_s)


def start_failure(ctx: Context, record: CommandRecord, event: CommandFinished) -> Evidence:
    """The sign of a start that a node refused or could not carry out."""
    match event.error_kind:
        case ErrorKind.STALE:
            # An agent that was restarted while it carried the command out: the workers are gone,
            # and the node has done nothing wrong.
            return sign(ctx, EvidenceKind.WORKERS_MISSING, record.node, event.detail)
        case ErrorKind.NONE:
            failure = FailureClass.NONE
        case ErrorKind.CONFIG:
            failure = FailureClass.CONFIG
        case ErrorKind.MISFIT:
            failure = FailureClass.MISFIT
        case ErrorKind.OCCUPIED:
            failure = FailureClass.OCCUPIED
        case ErrorKind.MISSING:
            failure = FailureClass.MISSING
        case ErrorKind.RESOURCE:
            failure = FailureClass.RESOURCE
        case ErrorKind.STORAGE:
            failure = FailureClass.STORAGE
        case ErrorKind.INTERNAL:
            failure = FailureClass.INTERNAL
        case _:
            assert_never(event.error_kind)
    refused = sign(ctx, EvidenceKind.START_FAILED, record.node, event.detail)
    return replace(refused, fault_class=failure)


def _place(ctx: Context, job: JobRecord, node: NodeRecord) -> None:
    for command in ctx.commands_of(RunSuite, node=node.node):
        # The agent gives it up for what the job wants there.
        ctx.close_command(command.command_id, f"the node takes a place of {job.job_id}")
    ctx.move_node(replace(node, job=job.job_id), NodeState.ASSIGNED, f"runs {job.job_id}")


def close_checks(ctx: Context, job: JobRecord, why: str) -> None:
    """Wait for no check any more."""
    searching.give_up(ctx, job, why)
    for command in ctx.commands_of(RunSuite, job=job.job_id):
        ctx.close_command(command.command_id, f"job {job.job_id} no longer waits for it")


def release_nodes(ctx: Context, job: JobRecord) -> None:
    """Give a job's nodes back."""
    for node_id in job.nodes:
        node = nodes.placed(ctx, job, node_id)
        if node is None:
            continue
        to = NodeState.DRAINED if node.state is NodeState.DRAINING else NodeState.READY
        ctx.move_node(replace(node, job=None), to, f"{job.job_id} is {job.state}")
