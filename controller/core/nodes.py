"""What can be done with one node: place, check, quarantine, retire.

Used by jobs and by the fleet alike; knows nothing of either's reasons.
"""

from __future__ import annotations

from controller.core import misfit
from controller.core.context import Context
from controller.core.effects import Alert, EvictNode
from controller.core.events import CommandFinished
from controller.core.frozen import replace
from controller.core.orders import CommandRecord, ForgetJob, RunSuite, StopWorkers
from controller.core.records import NO_ATTEMPT, JobRecord, NodeRecord
from controller.core.states import PLACED, NodeState
from outlast.ids import CommandId, NodeId

# Asking again costs seconds; a node whose checks cannot run at all is not fit for use.
MAX_UNRUN_SUITES = 3
# Other jobs that a reason names.
_MAX_NAMED = 3


def placed(ctx: Context, job: JobRecord, node_id: NodeId | None) -> NodeRecord | None:
    """The node in one of the job's places, if it still holds it."""
    if node_id is None:
        return None
    node = ctx.state.nodes.get(node_id)
    if node is None or node.state not in PLACED or node.job != job.job_id:
        return None
    return node


def free_nodes(ctx: Context, job: JobRecord) -> list[NodeRecord]:
    """Nodes that may take a place of this job, best first: those that it had,
    then checked standbys, then others."""
    rank = {NodeState.STANDBY: 1, NodeState.READY: 2}
    found = [node for node in usable_nodes(ctx) if misfit.fits(job, node, ctx.now_s)]
    # Thousands of nodes are held against thousands of places.
    own = frozenset(job.nodes)
    found.sort(key=lambda node: (0 if node.node in own else rank[node.state], node.node))
    return found


def usable_nodes(ctx: Context) -> list[NodeRecord]:
    """Nodes that are free for any job that they suit."""
    # Workers of another attempt may still be alive there.
    stopping = {command.node for command in ctx.commands_of(StopWorkers)}
    return [
        node
        for node in map(ctx.state.nodes.__getitem__, ctx.state.index.free)
        if may_be_used(ctx, node)
        and ctx.connected(node.node)
        and not ctx.view(node.node).late
        and node.node not in stopping
    ]


def may_be_used(ctx: Context, node: NodeRecord) -> bool:
    """Whether nothing but its present work, or a moment's silence, keeps a job off a node."""
    is_shut = node.cordoned or ctx.view(node.node).closed
    return not (is_shut or node.is_stuck or node.has_left)


def held_by_others(ctx: Context, job: JobRecord) -> str:
    """Which other jobs have nodes, and how many, in words; "" when none does."""
    held = {
        other.job_id: sum(placed(ctx, other, node) is not None for node in other.nodes)
        for other in ctx.state.live_jobs()
        if other.job_id != job.job_id
    }
    most = sorted((each for each in held.items() if each[1]), key=lambda each: (-each[1], each[0]))
    words = [f"job {name} has {count} node(s)" for name, count in most[:_MAX_NAMED]]
    if len(most) > _MAX_NAMED:
        words.append(f"{len(most) - _MAX_NAMED} more jobs have others")
    return ", ".join(words)


def run_suite(
    ctx: Context,
    node: NodeRecord,
    suite: str,
    timeout_s: float,
    job: JobRecord | None = None,
    *,
    storage: str = "",
) -> NodeRecord:
    """Ask a node for a suite of checks, for a job or for nobody; storage is checked where it is
    known: the job's, or `storage`."""
    node = ctx.put(replace(node, num_suites=node.num_suites + 1))
    ctx.open_command(
        CommandId(f"{node.node}/suite/{node.num_suites}"),
        node.node,
        RunSuite(
            suite=suite,
            timeout_s=timeout_s,
            checkpoint_url=storage if job is None else job.checkpoint_url,
        ),
        job=None if job is None else job.job_id,
        attempt=NO_ATTEMPT if job is None else job.attempt,
    )
    return node


def suite_passed(
    ctx: Context, record: CommandRecord, event: CommandFinished, job: JobRecord | None = None
) -> bool | None:
    """Whether a node passed; None when its suite could not run and is asked for again.

    A suite that did not run says nothing about the node, neither good nor bad.
    """
    node = ctx.state.nodes[record.node]
    assert isinstance(record.command, RunSuite)
    if event.ok and event.verdict not in ("", "error"):
        passed = event.verdict != "fail"
        checked_s = ctx.now_s if passed else None
        storage = record.command.checkpoint_url if passed else ""
        ctx.put(replace(node, unrun_suites=0, checked_s=checked_s, checked_storage=storage))
        return passed
    if node.unrun_suites + 1 >= MAX_UNRUN_SUITES:
        ctx.put(replace(node, unrun_suites=0))
        return False
    node = ctx.put(replace(node, unrun_suites=node.unrun_suites + 1))
    suite = record.command
    run_suite(ctx, node, suite.suite, suite.timeout_s, job, storage=suite.checkpoint_url)
    return None


def quarantine(ctx: Context, node: NodeRecord, reason: str) -> bool:
    """Exclude a node; False when the breaker does not allow another one now."""
    if _breaker_is_open(ctx):
        return False
    begun = ctx.now_s - ctx.settings.retire_window_s
    sessions = (*(at_s for at_s in node.quarantines_s if at_s > begun), ctx.now_s)
    node = ctx.move_node(
        replace(
            node,
            job=None,
            quarantines_s=sessions,
            quarantine=node.session_of(ctx.now_s),
            quarantined_s=ctx.now_s,
            passes=0,
        ),
        NodeState.QUARANTINED,
        reason,
        timer_s=ctx.now_s + ctx.settings.abandon_s,
    )
    close_commands(ctx, node.node, "the node is quarantined", keep_stops=True)
    if len(sessions) >= ctx.settings.retire_after_quarantines:
        retire(ctx, node, f"quarantined {len(sessions)} times in 7 days; last: {reason}")
    return True


def keep_out(ctx: Context, node: NodeRecord, reason: str) -> None:
    """Keep a node that is not fit for use, and has no workers, from every job."""
    # The breaker bounds quarantines, not caution.
    if not quarantine(ctx, node, reason):
        cordon(ctx, node, reason)


def cordon(ctx: Context, node: NodeRecord, reason: str) -> None:
    """Use a node that has no workers no more before a person says so."""
    close_commands(ctx, node.node, reason, keep_stops=True)
    if node.state is not NodeState.READY:
        node = ctx.move_node(replace(node, job=None), NodeState.READY, reason)
    ctx.put(replace(node, cordoned=True, reason=reason))
    ctx.emit(Alert(summary=f"node {node.node} is cordoned: {reason}"))


def breaker_opens_s(ctx: Context) -> float:
    """When the next quarantine is allowed again."""
    begun = ctx.now_s - ctx.settings.breaker_window_s
    blamed = map(ctx.state.nodes.__getitem__, ctx.state.index.blamed.members)
    recent = sorted(at for node in blamed for at in node.quarantines_s)
    recent = [at_s for at_s in recent if at_s > begun]
    excess = len(recent) - _breaker_limit(ctx)
    if excess < 0:
        return ctx.now_s
    return recent[excess] + ctx.settings.breaker_window_s


def retire(ctx: Context, node: NodeRecord, reason: str) -> None:
    """Give a node up."""
    close_commands(ctx, node.node, "the node is retired", keep_stops=False)
    if not node.quarantine:
        session = node.session_of(ctx.now_s)
        node = replace(node, quarantine=session, quarantined_s=ctx.now_s)
    ctx.move_node(replace(node, job=None, passes=0), NodeState.RETIRED, reason)
    ctx.emit(EvictNode(node=node.node, reason=reason))
    ctx.emit(Alert(summary=f"node {node.node} is retired: {reason}"))


def release(ctx: Context, node: NodeRecord, reason: str) -> None:
    """Give a node back that has done nothing wrong."""
    close_commands(ctx, node.node, "the node is the cluster's again", keep_stops=False)
    ctx.move_node(
        replace(node, job=None, passes=0, quarantine="", quarantined_s=None),
        NodeState.RELEASED,
        reason,
    )


def drop_from_jobs(ctx: Context, node: NodeId) -> None:
    """Forget what jobs that go on know of a node that is on no list any more."""
    for job in ctx.state.live_jobs():
        ctx.put(
            replace(
                job,
                held_by=tuple(each for each in job.held_by if each != node),
                misfits=tuple(each for each in job.misfits if each.node != node),
                unreproduced=tuple(each for each in job.unreproduced if each != node),
            )
        )


def close_commands(ctx: Context, node: NodeId, why: str, *, keep_stops: bool) -> None:
    """Give up what was asked of a node. Orders to stop and to forget outlive a mere
    quarantine: the node may come back with old workers and their memory."""
    for command_id in list(ctx.state.index.of_node.get(node, ())):
        command = ctx.state.commands[command_id].command
        if not (keep_stops and isinstance(command, StopWorkers | ForgetJob)):
            ctx.close_command(command_id, why)


def _breaker_limit(ctx: Context) -> int:
    index = ctx.state.index
    return max(1, int(ctx.settings.breaker_share * (len(index.order) - len(index.away))))


def _breaker_is_open(ctx: Context) -> bool:
    return breaker_opens_s(ctx) > ctx.now_s
