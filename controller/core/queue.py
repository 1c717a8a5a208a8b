"""Whose turn it is: jobs that wait for nodes, and who makes room for them.

A job starts when all its nodes are there (gang admission), so that no two hold half of what they
need. Those of a higher priority come first; of equal ones those for which nodes are kept, then
those whose owner has fewer nodes, then those that came first.

Others may go ahead of a job that cannot start yet. Free nodes that it can use are kept for it
against those of a lower priority, and against all once it has waited for long, or once another
makes room for it: so small jobs do not starve large ones. The time for which it waited for its
owner's quota does not count. Nothing is kept for a job that the fleet is too small for.

A job that may preempt has jobs of a lower priority stop after a step. They go on from there when it
is their turn again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from controller.core import attempts, incidents, last_checkpoint, misfit, nodes
from controller.core.context import Context
from controller.core.frozen import replace
from controller.core.kinds import Wanted
from controller.core.records import JobRecord, NodeRecord
from controller.core.states import AWAY, EXCLUDED, JobState, NodeState
from outlast.ids import JobId, NodeId

# More than any fleet has.
_ANY_NUMBER = 1 << 31
_NOTHING: frozenset[NodeId] = frozenset()
# Without workers: they give their nodes back at once.
_NOT_STARTED = (JobState.PROVISIONING, JobState.PREFLIGHT)


@dataclass(slots=True)
class _Kept:
    """Free nodes that are kept for jobs ahead; `by` has the first job for each kind of need."""

    nodes: frozenset[NodeId] = _NOTHING
    by: dict[object, JobId] = field(default_factory=dict)

    def add(self, turns: Turns, job: JobRecord) -> _Kept:
        """The same, and what this job can use."""
        kind = _kind_of(job)
        if kind in self.by:
            return self
        return _Kept(nodes=self.nodes | turns.free_for(job), by={**self.by, kind: job.job_id})


class Turns:
    """How things stand between two moves of any job or node."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        live = ctx.state.live_jobs()
        self.held = Counter[str]()
        for job in live:
            self.held[job.owner] += ctx.state.index.num_held.get(job.job_id, 0)
        self._given_room = {job.yields_to for job in live if job.job_id not in ctx.aside}
        queued = [job for job in live if job.state is JobState.QUEUED]
        self.order = sorted(queued, key=self._key) if len(queued) > 1 else queued
        # A running job that lost a node is served before all that wait.
        self._needy = [
            job for job in live if job.state is JobState.PROVISIONING and None in job.nodes
        ]
        self._usable: list[NodeRecord] | None = None
        self._there: list[NodeRecord] | None = None
        self._free: dict[object, frozenset[NodeId]] = {}
        self._could: dict[object, int] = {}
        self._kept: dict[JobId, _Kept] | None = None

    def free_for(self, job: JobRecord) -> frozenset[NodeId]:
        """The free nodes that suit a job."""
        kind = _kind_of(job)
        if kind not in self._free:
            if self._usable is None:
                self._usable = nodes.usable_nodes(self._ctx)
            now_s = self._ctx.now_s
            suiting = (node for node in self._usable if misfit.fits(job, node, now_s))
            self._free[kind] = frozenset(node.node for node in suiting)
        return self._free[kind]

    def kept_from(self, job: JobRecord) -> _Kept:
        """What is kept for others, and not for this job."""
        if job.state is JobState.QUEUED:
            if self._kept is None:
                self._kept = dict(self._all_kept())
            return self._kept.get(job.job_id, _Kept())
        # One that lacks a node is not held up by those that have waited for long.
        is_needy = job.state is JobState.PROVISIONING
        kept = _Kept()
        for ahead in self._holding():
            is_higher = ahead.plan.priority > job.plan.priority
            if is_higher or (self._is_reserved(ahead) and not is_needy):
                kept = kept.add(self, ahead)
        return kept

    def is_over_quota(self, job: JobRecord) -> bool:
        """Whether its owner may not have the nodes that a job wants now."""
        return job.plan.nodes > self.left_of_quota(job)

    def left_of_quota(self, job: JobRecord) -> int:
        """How many more nodes the owner of a job may have."""
        most = self._ctx.settings.quota_of(job.owner)
        return _ANY_NUMBER if most is None else max(0, most - self.held[job.owner])

    def _key(self, job: JobRecord) -> tuple[object, ...]:
        return (
            -job.plan.priority,
            not self._is_reserved(job),
            self.held[job.owner],
            job.submitted_s,
            job.job_id,
        )

    def waited_s(self, job: JobRecord) -> float:
        """For how long a job has waited for nodes that its owner may have.

        If the time for which it waited for his quota counted, a long backlog would come before the
        jobs of all who have fewer nodes.
        """
        since_s = max(job.since_s, self._ctx.allowed_s.get(job.job_id, job.since_s))
        return self._ctx.now_s - since_s

    def _is_reserved(self, job: JobRecord) -> bool:
        if job.job_id in self._given_room:
            return True
        has_waited = self.waited_s(job) >= self._ctx.settings.reserve_after_s
        return has_waited and not job.held_back and not self.is_over_quota(job)

    def _holding(self) -> Iterator[JobRecord]:
        """Jobs for which nodes can be kept at all, by their turn."""
        for job in self.order:
            is_able = job.job_id not in self._ctx.aside and not self.is_over_quota(job)
            if is_able and self._could_ever_start(job):
                yield job

    def _all_kept(self) -> Iterator[tuple[JobId, _Kept]]:
        """What is kept from each job that waits."""
        holding = {job.job_id for job in self._holding()}
        # `equal` has also those that hold against jobs of a lower priority only.
        kept, equal, priority = _Kept(), _Kept(), None
        for job in self.order:
            if job.plan.priority != priority:
                priority = job.plan.priority
                for needy in self._needy:
                    if needy.plan.priority >= priority:
                        equal = equal.add(self, needy)
                kept = equal
            yield job.job_id, kept
            if job.job_id in holding:
                equal = equal.add(self, job)
                if self._is_reserved(job):
                    kept = kept.add(self, job)

    def _could_ever_start(self, job: JobRecord) -> bool:
        """Whether the fleet has enough nodes for a job, those of other jobs counted."""
        asked = replace(job, misfits=())
        kind = _kind_of(asked)
        if kind not in self._could:
            if self._there is None:
                self._there = [
                    node
                    for node in self._ctx.state.nodes.values()
                    if node.state not in (*AWAY, *EXCLUDED, NodeState.DRAINING)
                    and nodes.may_be_used(self._ctx, node)
                ]
            now_s = self._ctx.now_s
            self._could[kind] = sum(misfit.fits(asked, node, now_s) for node in self._there)
        return self._could[kind] >= job.plan.nodes


def turns(ctx: Context) -> Turns:
    """How things stand now."""
    if not isinstance(ctx.turns, Turns):
        ctx.turns = Turns(ctx)
    return ctx.turns


def in_order(ctx: Context) -> Iterator[JobId]:
    """All jobs that have not ended: first those that give nodes back or need some, then those that
    wait, by their turn, and last those that run, and may grow.

    A job that starts meanwhile changes the shares of owners, and so who is next.
    """
    live = ctx.state.live_jobs()
    others = [job for job in live if job.state not in (JobState.QUEUED, JobState.RUNNING)]
    others.sort(key=lambda job: job.state is not JobState.SUSPENDING)
    yield from [job.job_id for job in others]
    done: set[JobId] = set()
    while left := [job for job in turns(ctx).order if job.job_id not in done]:
        for job in left:
            done.add(job.job_id)
            yield job.job_id
            if ctx.state.jobs[job.job_id].state is not JobState.QUEUED:
                break
    yield from [job.job_id for job in live if job.state is JobState.RUNNING]


def over_quota(ctx: Context, job: JobRecord) -> str:
    """Why its owner may not have the nodes that a job wants now; "" when he may."""
    now = turns(ctx)
    if not now.is_over_quota(job):
        return ""
    most, held = ctx.settings.quota_of(job.owner), now.held[job.owner]
    return (
        f"{job.owner} may have {most} node(s) at a time and has {held}; this job needs "
        f"{job.plan.nodes}"
    )


def kept_for_others(ctx: Context, job: JobRecord) -> tuple[str, frozenset[NodeId]]:
    """The job ahead of this one for which nodes are kept that this one could use, if any, and all
    nodes that are kept."""
    now = turns(ctx)
    kept = now.kept_from(job)
    own = now.free_for(job)
    for ahead in kept.by.values():
        if not own.isdisjoint(now.free_for(ctx.state.jobs[ahead])):
            return ahead, kept.nodes
    return "", kept.nodes


def make_room(ctx: Context, job: JobRecord, num_free: int) -> str:
    """Have jobs of a lower priority stop, if that gives this one all its nodes.

    Says which make room; "" when none does.
    """
    if not job.plan.preempts or ctx.is_unsure:
        return ""
    is_new = turns(ctx).waited_s(job) < ctx.settings.reserve_after_s
    if ctx.settings.brings_nodes and is_new:
        # The cluster may have hosts for it.
        return ""
    ahead = [ctx.state.jobs[each] for each in turns(ctx).kept_from(job).by.values()]
    live = [each for each in ctx.state.live_jobs() if each.job_id not in ctx.aside]
    yielding = [each for each in live if each.yields_to == job.job_id]
    missing = job.plan.nodes - num_free - sum(_gain(ctx, job, each, ahead) for each in yielding)
    if missing > 0:
        chosen = _victims(ctx, job, live, ahead, missing)
        for victim in chosen:
            _stop(ctx, victim, job)
        yielding += chosen
    return ", ".join(each.job_id for each in yielding)


def leave(ctx: Context, job: JobRecord) -> bool:
    """The workers of a job that makes room have stopped: it waits for its turn again, once their
    last step is in storage. The patience with the stop bounds that wait, too.
    """
    committed = -1 if job.committed_step is None else job.committed_step
    assert job.grow_step is not None, f"job {job.job_id} makes no room"
    saves_itself = job.plan.is_script and job.committed_step is None
    if job.deadline_s is not None and committed < job.grow_step and not saves_itself:
        return False
    is_done = last_checkpoint.are_steps_done(ctx, job)
    if is_done and (job.plan.is_script or last_checkpoint.is_stored(job)):
        attempts.finish(ctx, job, JobState.SUCCEEDED, "it was done when it had to make room")
        return True
    _requeue(ctx, job, f"made room for {job.yields_to}")
    return True


def _stop(ctx: Context, victim: JobRecord, job: JobRecord) -> None:
    why = (
        f"its nodes go to {job.job_id}, whose priority is {job.plan.priority}, not "
        f"{victim.plan.priority}"
    )
    if victim.state in _NOT_STARTED:
        attempts.close_checks(ctx, victim, why)
        _requeue(ctx, incidents.close_for(ctx, victim, why), why)
        return
    victim = ctx.put(replace(victim, grow_step=-1, yields_to=job.job_id))
    attempts.suspend(ctx, victim, why, graceful=True)


def _requeue(ctx: Context, job: JobRecord, why: str) -> None:
    job = replace(job, grow_step=None, yields_to=None, unchecked=(), num_yields=job.num_yields + 1)
    job = ctx.move_job(job, JobState.QUEUED, f"{why}; it goes on when it is its turn again")
    attempts.release_nodes(ctx, job)


def _victims(
    ctx: Context, job: JobRecord, live: list[JobRecord], ahead: list[JobRecord], missing: int
) -> list[JobRecord]:
    """Jobs to stop for so many nodes: those of the lowest priority, of these the ones that have
    been in their state for the shortest time; none when all together would not do."""
    able = [
        each
        for each in live
        if each.plan.priority < job.plan.priority
        and each.wanted is Wanted.RUN
        and each.job_id not in ctx.state.done
        and (
            each.state in _NOT_STARTED or (each.state is JobState.RUNNING and each.incident is None)
        )
    ]
    able.sort(key=lambda each: (each.plan.priority, -each.since_s, each.job_id))
    chosen: list[JobRecord] = []
    for each in able:
        if missing <= 0:
            break
        gained = _gain(ctx, job, each, ahead)
        if gained:
            chosen.append(each)
            missing -= gained
    if missing > 0:
        return []
    # What was taken before a large one may not be needed any more.
    for each in reversed(chosen[:-1]):
        gained = _gain(ctx, job, each, ahead)
        if missing + gained <= 0:
            chosen.remove(each)
            missing += gained
    return chosen


def _gain(ctx: Context, job: JobRecord, other: JobRecord, ahead: list[JobRecord]) -> int:
    """How many nodes of another job this one would get, and not one that is ahead of it."""
    held = (nodes.placed(ctx, other, node) for node in other.nodes)
    return sum(
        node is not None
        and node.state is NodeState.ASSIGNED
        and nodes.may_be_used(ctx, node)
        and ctx.connected(node.node)
        and misfit.fits(job, node, ctx.now_s)
        and not any(misfit.fits(each, node, ctx.now_s) for each in ahead)
        for node in held
    )


def _kind_of(job: JobRecord) -> object:
    """What decides which nodes suit a job."""
    return job.plan.workers_per_node, job.plan.need, job.misfits
