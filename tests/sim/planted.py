"""Mistakes that controller, edge and agent could make, one entry each: what is put where.

Each is caught by some of the first few seeds, of the virtual world as it is or of a story; see
`test_planted_bugs`. A new one is a line: `bug(what, invariants, (owner, name, value))`, or
`around(owner, name, value)`, where `value` is given the original as its first argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from checkpoint.core import slots
from controller.agent.core import commands, line
from controller.agent.core.actions import Answer, KeepLedger, ReportEnd
from controller.agent.core.commands import CommandMachine
from controller.agent.core.ledger import CommandKind, CommandLedger
from controller.agent.core.line import Line
from controller.agent.core.machine import AgentMachine
from controller.agent.core.reports import Reports
from controller.agent.core.steps import STEPS, Step
from controller.agent.core.workers import WorkerTable
from controller.core import (
    attempts,
    blame,
    fleet,
    incidents,
    job_progression,
    jobs,
    losses,
    nodes,
    planned,
    retention,
    validating,
)
from controller.core import events as ev
from controller.core.changes import CommandOpened
from controller.core.context import Context
from controller.core.edge import liveness
from controller.core.edge.edge import Edge
from controller.core.edge.hangs import HangTable
from controller.core.edge.liveness import LivenessTable
from controller.core.edge.progress import ProgressTable
from controller.core.effects import Persist, SendCommand
from controller.core.machine import Machine
from controller.core.node_events import NodeJoined, NodeLate, NodeSilent, WorkerExited
from controller.core.states import JobState
from controller.core.verdict import first_failure
from controller.sim import journal
from controller.sim.journal import Journal
from controller.sim.run import run_seed
from tests.sim import stories
from tests.sim.stories import Story

Plant = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """`by` are the invariants of which one falls, within so many seeds from 0 on; `says` is in
    its words."""

    what: str
    by: tuple[int, ...]
    seeds: int
    plants: tuple[Plant, ...]
    says: str = ""
    # What is told by each of these seeds.
    story: Callable[[int], object] = run_seed


def around(owner: Any, name: str, value: Callable[..., Any]) -> Plant:
    """`value` gets the original first."""
    original = getattr(owner, name)

    def instead(*args: Any, **kwargs: Any) -> Any:
        return value(original, *args, **kwargs)

    return owner, name, instead


def bug(what: str, by: tuple[int, ...], *plants: Plant, seeds: int = 10, says: str = "") -> Bug:
    return Bug(what=what, by=by, seeds=seeds, plants=plants, says=says)


def told(story: Story, what: str, by: tuple[int, ...], *plants: Plant, seeds: int = 2) -> Bug:
    """One that is caught where this happens."""
    return Bug(what=what, by=by, seeds=seeds, plants=plants, story=story)


def _nothing(*_: Any, **__: Any) -> None:
    """What should happen does not."""


def _no(*_: Any, **__: Any) -> bool:
    return False


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _none_of_them(*_: Any, **__: Any) -> list[Any]:
    return []


def _never(*_: Any) -> float:
    return math.inf


# Of the edge


def _limit_cut(stalled: Any, table: Any, job: Any, now_s: float, limit_s: float) -> Any:
    return stalled(table, job, now_s, limit_s / 20)


def _as_of_trainer(due_s: Any, table: Any, job: Any, limit_s: float) -> Any:
    return due_s(table, replace(job, plan=replace(job.plan, total_steps=1)), limit_s)


def _stood_long(_table: Any, _job: Any, _now_s: float, limit_s: float) -> float:
    return limit_s + 1.0


# Of the controller


def _journal_last(take_batch: Any, ctx: Context) -> Any:
    return sorted(take_batch(ctx), key=lambda effect: isinstance(effect, Persist))


def _silent_when_late(late: Any, ctx: Context, event: NodeLate) -> None:
    losses.silent(ctx, NodeSilent(node=event.node, silent_s=event.silent_s))


def _without_cordon(validated: Any, ctx: Context, node: Any, **facts: Any) -> None:
    validated(ctx, ctx.put(replace(node, cordoned=False)), **facts)


def _joins_without_cordon(joined: Any, ctx: Context, event: NodeJoined) -> None:
    joined(ctx, event)
    ctx.put(replace(ctx.state.nodes[event.node], cordoned=False))


def _refilled(advanced: Any, ctx: Context, job: Any, event: ev.JobAdvanced) -> None:
    advanced(ctx, ctx.put(replace(job, retry_left=job.plan.retry_budget)), event)


def _believed(_: Any, ctx: Context, event: ev.CheckpointFailed) -> None:
    committed = ev.CheckpointCommitted(job_id=event.job_id, step=event.step)
    incidents.checkpoint_committed(ctx, committed)


def _untold(_: Any, ctx: Context, incident: Any, *__: object, **___: object) -> Any:
    changed = replace(incident, timeline=())
    ctx.state.incidents[incident.incident] = changed
    return changed


def _first_reporter(_: Any, facts: Any) -> Any:
    failure = first_failure(facts.evidence)
    return () if failure is None or failure.node is None else (failure.node,)


def _sent_unrecorded(record: Any, ctx: Context, change: Any) -> None:
    if not isinstance(change, CommandOpened):
        record(ctx, change)
    else:
        ctx.emit(SendCommand(command=change.command))


def _two_attempts(start: Any, ctx: Context, job: Any, reason: str) -> None:
    start(ctx, replace(job, attempt=job.attempt + 1), reason)


def _with_common_step_in_use(choose_slot: Any, kept: Any, **facts: Any) -> Any:
    return choose_slot(kept, **{**facts, "common_step": -1})


def _of_any_attempt(exited: Any, ctx: Context, event: WorkerExited) -> None:
    job = ctx.state.jobs[event.job_id]
    exited(ctx, replace(event, attempt=job.attempt))


def _careless(compacted: Any, changes: Iterable[Any]) -> Any:
    written = compacted(changes)
    return written if len(written) < 4 else written[:-1]


_STARTS = {CommandKind.START: tuple(s for s in STEPS[CommandKind.START] if s is not Step.KILL)}

CONTROLLER_BUGS = (
    bug("a batch loses its last change", (9,), around(journal, "compacted", _careless)),
    bug(
        "neither side ends the old workers before a start",
        (1,),
        (attempts, "stops_pending", lambda *_: iter(())),
        (commands, "STEPS", {**STEPS, **_STARTS}),
    ),
    bug("effects come before the journal", (2,), around(Context, "take_batch", _journal_last)),
    bug("a late node is lost", (2,), around(losses, "late", _silent_when_late)),
    bug(
        "a cut of our own counts",
        (2,),
        (losses, "suspect_ourselves", _nothing),
        seeds=40,
        says="blindness",
    ),
    bug("a deposed leader writes", (3,), (Journal, "check", _nothing)),
    bug("a quarantine never ends", (4,), (fleet, "_let_time_pass", _nothing)),
    bug(
        "a person's cordon is removed",
        (5,),
        around(validating, "ended", _without_cordon),
        around(fleet, "joined", _joins_without_cordon),
    ),
    bug("retries are refilled by a step", (6,), around(incidents, "advanced", _refilled)),
    bug(
        "a failed checkpoint counts",
        (7,),
        around(incidents, "checkpoint_failed", _believed),
        seeds=40,
    ),
    bug("the breaker stops nothing", (8,), (nodes, "_breaker_is_open", _no), seeds=40),
    bug("a note misses the journal", (9,), around(Context, "note", _untold)),
    bug(
        "nobody repairs a job",
        (10,),
        (job_progression, "_STEPS", {**job_progression._STEPS, JobState.REPAIRING: _no}),
    ),
    bug(
        "a rank that lost its peer is blamed",
        (11,),
        around(blame, "culprits", _first_reporter),
        seeds=40,
    ),
    bug("orders miss the journal", (2,), around(Context, "record", _sent_unrecorded)),
    bug("an attempt is left out", (1,), around(attempts, "start", _two_attempts)),
    bug("an excluded node needs no checks", (14,), (validating, "PASSES_TO_RETURN", 0)),
    bug("one clean check is enough", (14,), (validating, "PASSES_TO_RETURN", 1)),
    bug("a planned stop is a fault", (15,), (planned, "left_in_order", _nothing), seeds=40),
    bug("peers are said to have seen it", (2,), (losses, "_peers_saw_it", _yes)),
    bug("a restart judges before agents are back", (2, 10), (losses, "end_reconciling", _nothing)),
    bug(
        "nodes are used twice",
        (1,),
        (nodes, "placed", lambda ctx, job, node: ctx.state.nodes.get(node)),
    ),
    bug("the controller's wake-up is dropped", (10,), (Machine, "wake_at", _nothing)),
    bug(
        "a limit that has passed changes nothing",
        (10,),
        (jobs, "deadline_passed", _nothing),
        # Most limits are met by other signs before.
        seeds=60,
    ),
    told(
        stories.events_come_twice,
        "the end of a worker of an old attempt counts",
        (16,),
        around(jobs, "worker_exited", _of_any_attempt),
        seeds=10,
    ),
    told(
        stories.agent_restarts,
        "nobody asks what became of the workers of a restarted agent",
        (13,),
        (fleet, "_reconcile_workers", _nothing),
    ),
    told(
        stories.start_is_lost,
        "an order to start outlives its agent",
        (1,),
        (fleet, "_drop_starts", _none_of_them),
    ),
    told(
        stories.slots_are_read,
        "a slot in host memory is used again too early",
        (7,),
        around(slots, "choose_slot", _with_common_step_in_use),
    ),
    told(
        stories.slots_are_read,
        "a step that some rank has missed is taken for common",
        (7,),
        (slots, "common_step", lambda *, highest, **_: highest),
    ),
    told(
        stories.spare_dies,
        "orders outlive an exclusion",
        (10,),
        (nodes, "close_commands", _nothing),
    ),
    told(stories.records_expire, "nothing expires", (10,), (retention, "prune", _nothing)),
    told(
        stories.records_expire,
        "a job is deleted that a node has not forgotten",
        (10,),
        (retention, "may_prune", _yes),
    ),
)

# Of the edge


def _a_level_early(*_: Any) -> Any:
    return {**liveness._EVENTS, liveness._Level.LATE: NodeSilent}


EDGE_BUGS = (
    bug("silence is never reported", (10,), (LivenessTable, "expire", _none_of_them)),
    bug(
        "a node that is heard again stays silent", (2, 16), (LivenessTable, "heard", _none_of_them)
    ),
    bug("a stall is never reported", (10,), (Edge, "_stalled", _none_of_them)),
    bug("a limit on steps is a twentieth", (13,), around(ProgressTable, "stalled", _limit_cut)),
    bug(
        "a job that trains has stood",
        (13,),
        (ProgressTable, "stalled", _stood_long),
        (ProgressTable, "is_stalled", _yes),
    ),
    bug(
        "a script is asked for steps that it never tells",
        (13,),
        around(ProgressTable, "due_s", _as_of_trainer),
    ),
    bug("progress goes unnoticed", (13,), (ProgressTable, "made", _none_of_them)),
    bug("the edge's wake-up is dropped", (10, 13), (Edge, "wake_at", _nothing), seeds=40),
    told(stories.host_breaks, "a broken host is not noted", (16,), (Edge, "closed", _none_of_them)),
    told(
        stories.start_hangs,
        "a late start is not told",
        (16,),
        (HangTable, "start_is_late", _none_of_them),
    ),
    told(
        stories.heartbeats_are_many,
        "the period that a job wants is not told",
        (16,),
        (Edge, "wanted_period_s", lambda *_: 2.0),
    ),
    told(
        stories.heartbeats_are_rare,
        "the period that an agent was told is ignored",
        (16,),
        (Edge, "told_period", _nothing),
    ),
    told(
        stories.job_hangs, "a learned limit is ignored", (13,), (HangTable, "heard", _none_of_them)
    ),
    told(
        stories.hang_ends,
        "an answer about a hang is acted on though its job goes on",
        (13,),
        (Edge, "_still_hangs", _yes),
        seeds=4,
    ),
    bug("silence is reported a level early", (2,), (liveness, "_EVENTS", _a_level_early())),
)

# Of the agent


def _without(kind: type[Any]) -> Callable[..., Any]:
    def quiet(original: Any, machine: Any, *args: Any) -> None:
        original(machine, *args)
        machine._actions = [each for each in machine._actions if not isinstance(each, kind)]

    return quiet


def _twice(kind: type[Any]) -> Callable[..., Any]:
    def loud(original: Any, machine: Any, *args: Any) -> None:
        original(machine, *args)
        machine._actions += [each for each in machine._actions if isinstance(each, kind)]

    return loud


def _begun_at_once(receive: Any, machine: Any, command: Any) -> None:
    receive(machine, command)
    running = machine._running.get(command.command_id)
    if running is not None and running.step is None and math.isinf(running.deadline_s):
        machine._begin(running)
        machine._actions.sort(key=lambda action: isinstance(action, KeepLedger))


def _run_again(admit: Any, ledger: Any, command_id: str, *args: Any) -> Any:
    ledger._results.pop(command_id, None)
    return admit(ledger, command_id, *args)


def _welcomed_midway(of: Any) -> None:
    of.is_connected, of._give_up_s = True, math.inf


def _drop_all(of: Any, seq: int) -> None:
    of.buffer.acknowledge(of.buffer.last_seq)


def _always_due(due: Any, reports: Any, key: Any, step: int, **_: Any) -> bool:
    return key in reports._attempts


def _later_starts(overtake: Any, machine: Any, job_id: str, attempt: int) -> None:
    overtake(machine, job_id, attempt - 1)


def _answered_first(finish: Any, machine: Any, *args: Any) -> None:
    finish(machine, *args)
    machine._actions.sort(key=lambda action: isinstance(action, KeepLedger))


AGENT_BUGS = (
    bug(
        "an answer comes before the ledger",
        (12,),
        around(CommandMachine, "_finish", _answered_first),
    ),
    told(
        stories.stop_overtakes_start,
        "no attempt is fenced off",
        (12,),
        (CommandLedger, "_why_stale", lambda *_: ""),
    ),
    bug("nobody wakes to give workers up", (12,), (Line, "wake_at", _never), seeds=30),
    bug("a stop does not cancel a start", (), (CommandMachine, "_overtake", _nothing)),
    bug("a stop cancels only older starts", (), around(CommandMachine, "_overtake", _later_starts)),
    bug(
        "nobody waits for the killed", (12,), (commands._Running, "alive", property(_none_of_them))
    ),
    bug("an answer is lost", (12,), around(CommandMachine, "_finish", _without(Answer))),
    bug("an answer is given twice", (12,), around(CommandMachine, "_finish", _twice(Answer))),
    bug(
        "a command begins before the ledger",
        (12,),
        around(CommandMachine, "_receive", _begun_at_once),
    ),
    bug("a repeated command runs again", (12,), around(CommandLedger, "admit", _run_again)),
    bug("the end of a worker goes unnoticed", (12,), (WorkerTable, "ended", _nothing)),
    bug(
        "an end is not reported",
        (12,),
        around(CommandMachine, "_workers_ended", _without(ReportEnd)),
    ),
    bug(
        "an end is reported twice",
        (12,),
        around(CommandMachine, "_workers_ended", _twice(ReportEnd)),
    ),
    bug("hello has ends that are still to come", (12,), (AgentMachine, "is_end_coming", _no)),
    bug("what is no news is reported", (12,), around(Reports, "is_progress_due", _always_due)),
    bug("an agent's wake-up is dropped", (12,), (CommandMachine, "wake_at", _never)),
    bug("a new session sends only what is new", (12,), (Line, "welcomed", _welcomed_midway)),
    bug("one acknowledgement drops everything", (12,), (Line, "acknowledged", _drop_all)),
    bug("an acknowledgement is ignored", (12,), (Line, "acknowledged", _nothing)),
    bug("workers are given up at once", (12,), (line, "DEFAULT_ABSENCE_LIMIT_S", 1.0)),
)

BUGS = (*CONTROLLER_BUGS, *EDGE_BUGS, *AGENT_BUGS)
