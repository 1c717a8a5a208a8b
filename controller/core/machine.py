"""The machine: the only mutator of the controller's state, and its only timer.

`handle` takes one event and the time and returns effects; the first of a batch
is always `Persist`, and nothing after it may run before that is durable. A
machine built from the fold of a journal goes on where the old one stopped:
`ControllerStarted` first, then agents join and tell what is true on their nodes.

State that is decided lives in `changes.State`; see `context` for what is merely seen.
"""

from __future__ import annotations

import math
from typing import assert_never

from controller.core import (
    attempts,
    deadlines,
    detections,
    elastic,
    fleet,
    images,
    incidents,
    job_progression,
    jobs,
    last_checkpoint,
    leaving,
    looks,
    losses,
    queue,
    requests,
    retention,
    searching,
)
from controller.core import events as ev
from controller.core.changes import State
from controller.core.context import Context, NodeView
from controller.core.effects import Effect
from controller.core.frozen import replace
from controller.core.node_events import (
    ImageNotPulled,
    NodeBack,
    NodeClosed,
    NodeCordonRequested,
    NodeDisconnected,
    NodeDrainRequested,
    NodeEvent,
    NodeForgetRequested,
    NodeGone,
    NodeHeard,
    NodeJoined,
    NodeLate,
    NodeLeft,
    NodeLocated,
    NodeLost,
    NodeReleased,
    NodeReplaced,
    NodesAwaited,
    NodeSilent,
    NodeUncordonRequested,
    WorkerExited,
)
from controller.core.records import JobRecord
from controller.core.settings import Settings
from outlast.ids import JobId, NodeId

# What ranks and agents say in thousands at once after a fault. Whatever follows from it for
# nodes that wait is a change of a node, a job or a command of theirs.
_OF_WORKERS = (WorkerExited, ev.CommandFinished, ev.JobAdvanced, ev.CheckpointCommitted)

# A person's requests for a job.
OF_PERSONS = (ev.JobCancelRequested, ev.JobPauseRequested, ev.JobResumeRequested)


class Machine:
    """Decides everything; does nothing."""

    def __init__(self, state: State | None = None, settings: Settings | None = None) -> None:
        self._ctx = Context(settings=settings or Settings(), state=state or State())
        # When time brings some node on.
        self._fleet_timer_s = math.inf
        self._job_at_work: JobId | None = None

    @property
    def state(self) -> State:
        """What has been decided so far. Read only."""
        return self._ctx.state

    @property
    def controller_blind(self) -> bool:
        """Whether the controller distrusts its own eyes just now."""
        return self._ctx.blind_until_s is not None

    def why_not_forgotten(self, node: NodeId) -> str:
        """Why a node has to stay on the list; "" when it need not."""
        return fleet.why_not_forgotten(self._ctx, node)

    def queue(self) -> list[JobRecord]:
        """The jobs that wait for their nodes, by their turn."""
        return queue.Turns(self._ctx).order

    @property
    def settings(self) -> Settings:
        """Bounds of the fleet as a whole."""
        return self._ctx.settings

    def handle(self, event: ev.Event, now_s: float) -> list[Effect]:
        """Take one event in; the effects must happen in their order."""
        ctx = self._ctx
        # Time never runs backwards in here, whatever the clock does.
        ctx.now_s = max(ctx.now_s, now_s)
        self._job_at_work = None
        ctx.turns = None
        if isinstance(event, OF_PERSONS):
            ctx.aside.pop(event.job_id, None)
        # What was due while no controller was there waits until reality is known.
        if not isinstance(event, ev.ControllerStarted):
            self._wake()
        if not isinstance(event, _OF_WORKERS):
            ctx.fleet_touched = True
        self._dispatch(event)
        self._tend_fleet()
        for job_id in queue.in_order(ctx):
            self._advance(job_id)
        self._tend_fleet()
        incidents.tend(ctx)
        detections.tend(ctx)
        return ctx.take_batch()

    def restore(self, state: State) -> None:
        """Continue from another state, the fold of the journal, as a machine just started.

        For a caller in which `handle` has failed: what it may have half changed is dropped.
        What the cluster has said of hosts stays, since it is said once; agents have to join
        again. `ControllerStarted` comes next.
        """
        old = self._ctx
        old.state.become(state)
        node_views = {
            node: NodeView(
                gone=view.gone,
                blames_host=view.blames_host,
                closed=view.closed,
                topology=view.topology,
            )
            for node, view in old.node_views.items()
            if view.gone or view.closed or view.topology
        }
        self._ctx = Context(
            settings=old.settings,
            state=old.state,
            node_views=node_views,
            now_s=old.now_s,
            awaited=old.awaited,
            aside=old.aside,
        )
        self._fleet_timer_s = math.inf
        self._job_at_work = None

    @property
    def job_at_work(self) -> JobId | None:
        """After `handle` has failed: the job on whose own state it was at work, if on one's."""
        return self._job_at_work

    @property
    def aside(self) -> dict[JobId, str]:
        """Jobs that are set aside, and why. Read only."""
        return self._ctx.aside

    def set_aside(self, job_id: JobId, why: str) -> None:
        """Decide nothing about a job from now on: its state makes `handle` fail.

        Its workers train on, and what is heard of it is noted. A person's request for it is one
        more try.
        """
        self._ctx.aside[job_id] = why

    def with_state(self, state: State) -> Machine:
        """A machine that has seen the same as this one, for a trial."""
        old = self._ctx
        other = Machine(state, old.settings)
        ctx = other._ctx
        for node, view in old.node_views.items():
            ctx.node_views[node] = replace(view)
        ctx.now_s, ctx.awaited, ctx.aside = old.now_s, old.awaited, dict(old.aside)
        ctx.allowed_s = dict(old.allowed_s)
        ctx.reconciling_until_s, ctx.blind_until_s = old.reconciling_until_s, old.blind_until_s
        for node in state.nodes:
            ctx.saw(node)
        return other

    def wake_at(self) -> float | None:
        """When `TimePassed` is due at the latest; None when nothing waits for time."""
        ctx = self._ctx
        times = [
            job.deadline_s
            for job in ctx.state.live_jobs()
            if job.deadline_s is not None and job.deadline_s > ctx.now_s
        ]
        if self._fleet_timer_s > ctx.now_s and self._fleet_timer_s < math.inf:
            times.append(self._fleet_timer_s)
        times += looks.next_look_s(ctx)
        times += [at_s for at_s in (ctx.reconciling_until_s, ctx.blind_until_s) if at_s is not None]
        return min(times, default=None)

    def _advance(self, job_id: JobId) -> None:
        """Move a job on, unless that has failed before."""
        ctx = self._ctx
        why = ctx.aside.get(job_id)
        if why is not None:
            ctx.explain(ctx.state.jobs[job_id], why)
            return
        self._job_at_work = job_id
        job_progression.advance(ctx, job_id)
        self._job_at_work = None

    def _tend_fleet(self) -> None:
        """Look after nodes that wait, unless nothing can have changed for any of them."""
        ctx = self._ctx
        if not ctx.fleet_touched and ctx.now_s < self._fleet_timer_s:
            return
        ctx.fleet_touched = False
        fleet.tend(ctx)
        self._fleet_timer_s = min(fleet.next_timer_s(ctx), default=math.inf)

    def _wake(self) -> None:
        """Let go of what has waited for a moment that has come."""
        ctx = self._ctx
        if ctx.reconciling_until_s is not None and ctx.reconciling_until_s <= ctx.now_s:
            losses.end_reconciling(ctx)
        if ctx.blind_until_s is not None and ctx.blind_until_s <= ctx.now_s:
            ctx.blind_until_s = None
            # The same cut may have come back meanwhile: most are not seen again.
            losses.suspect_ourselves(ctx)
            losses.judge_all(ctx)
        if ctx.reconciling_until_s is not None:
            return
        for job in ctx.state.live_jobs():
            is_due = job.deadline_s is not None and job.deadline_s <= ctx.now_s
            if is_due and job.job_id not in ctx.aside:
                self._job_at_work = job.job_id
                jobs.deadline_passed(ctx, job)
                self._job_at_work = None

    def _dispatch(self, event: ev.Event) -> None:
        ctx = self._ctx
        match event:
            case ev.ControllerStarted():
                deadlines.bring_back(ctx)
                ctx.reconciling_until_s = ctx.now_s + ctx.settings.reconcile_s
            case ev.TimePassed():
                pass
            case ev.JobSubmitted():
                requests.submitted(ctx, event)
            case ev.JobCancelRequested():
                requests.cancel_requested(ctx, event)
            case ev.JobPauseRequested():
                requests.pause_requested(ctx, event)
            case ev.JobResumeRequested():
                requests.resume_requested(ctx, event)
            case ev.CheckpointPushRequested():
                last_checkpoint.push_requested(ctx, event)
            case WorkerExited():
                jobs.worker_exited(ctx, event)
            case ev.JobAdvanced():
                jobs.advanced(ctx, event)
            case ev.JobStalled():
                jobs.stalled(ctx, event)
            case ev.Detected():
                detections.found(ctx, event)
            case ev.DetectionEnded():
                detections.ended(ctx, event)
            case ev.CheckpointCommitted():
                if incidents.checkpoint_committed(ctx, event):
                    elastic.at_boundary(ctx, event.job_id)
            case ev.CheckpointFailed():
                if event.is_awaited:
                    attempts.waits_for_storage(ctx, event)
                else:
                    incidents.checkpoint_failed(ctx, event)
                    last_checkpoint.failed(ctx, event)
            case ev.RecordsExpired():
                retention.prune(ctx, event)
            case NodesAwaited(detail=detail):
                ctx.awaited = detail
            case ImageNotPulled():
                images.not_pulled(ctx, event)
            case ev.CommandFinished():
                self._command_finished(event)
            case ev.FaultsSearched():
                searching.finished(ctx, event)
            case _:
                self._dispatch_node(event)

    def _dispatch_node(self, event: NodeEvent) -> None:
        ctx = self._ctx
        match event:
            case NodeJoined():
                fleet.joined(ctx, event)
            case NodeLeft():
                leaving.left(ctx, event)
            case NodeDisconnected():
                losses.disconnected(ctx, event)
            case NodeLate():
                losses.late(ctx, event)
            case NodeLost():
                losses.lost(ctx, event)
            case NodeSilent():
                losses.silent(ctx, event)
            case NodeHeard():
                losses.heard(ctx, event)
            case NodeGone():
                losses.gone(ctx, event)
            case NodeBack():
                losses.back(ctx, event)
            case NodeClosed():
                fleet.closed(ctx, event)
            case NodeLocated():
                fleet.located(ctx, event)
            case NodeReleased():
                fleet.released(ctx, event)
            case NodeReplaced():
                fleet.replaced(ctx, event)
            case NodeCordonRequested():
                fleet.cordon_requested(ctx, event)
            case NodeUncordonRequested():
                fleet.uncordon_requested(ctx, event)
            case NodeDrainRequested():
                fleet.drain_requested(ctx, event)
            case NodeForgetRequested():
                fleet.forget_requested(ctx, event)
            case _:
                assert_never(event)

    def _command_finished(self, event: ev.CommandFinished) -> None:
        """An answer closes its command, whoever waited; a second answer finds none."""
        ctx = self._ctx
        record = ctx.state.commands.get(event.command_id)
        if record is None or record.node != event.node:
            return
        ctx.close_command(event.command_id, event.detail or ("done" if event.ok else "failed"))
        if record.job is not None:
            jobs.command_finished(ctx, record, event)
        else:
            fleet.suite_finished(ctx, record, event)
