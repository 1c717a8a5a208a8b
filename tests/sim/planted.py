"""Mistakes that controller, edge and agent could make, one entry each: what is put where.

Each is caught by some of the first few seeds, of the virtual world as it is or of a story; see
`test_planted_bugs`. A new one is a line: `_bug(what, invariants, (owner, name, value))`, or
`_around(owner, name, value)`, where `value` is given the original as its first argument.
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
)
from controller.core import events as ev
from controller.core.context import Context
from controller.core.edge import liveness
from controller.core.edge.edge import Edge
from controller.core.edge.hangs import HangTable
from controller.core.edge.liveness import LivenessTable
from controller.core.edge.progress import ProgressTable
from controller.core.effects import Persist, SendCommand
from controller.core.facts import CommandOpened
from controller.core.machine import Machine
from controller.core.node_events import NodeJoined, NodeLate, NodeSilent, WorkerExited
from controller.core.states import JobState
from controller.core.verdict import root_failure
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


def _around(owner: Any, name: str, value: Callable[..., Any]) -> Plant:
    """`value` gets the original first."""
    original = getattr(owner, name)

    def instead(*args: Any, **kwargs: Any) -> Any:
        return value(original, *args, **kwargs)

    return owner, name, instead


def _bug(what: str, by: tuple[int, ...], *plants: Plant, seeds: int = 10, says: str = "") -> Bug:
    return Bug(what=what, by=by, seeds=seeds, plants=plants, says=says)


def _told(story: Story, what: str, by: tuple[int, ...], *plants: Plant, seeds: int = 2) -> Bug:
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
    root = root_failure(facts.evidence)
    return () if root is None or root.node is None else (root.node,)


def _sent_unrecorded(record: Any, ctx: Context, fact: Any) -> None:
    if not isinstance(fact, CommandOpened):
        record(ctx, fact)
    else:
        ctx.emit(SendCommand(command=fact.command))


def _two_attempts(start: Any, ctx: Context, job: Any, reason: str) -> None:
    start(ctx, replace(job, attempt=job.attempt + 1), reason)


def _with_common_step_in_use(choose_slot: Any, kept: Any, **facts: Any) -> Any:
    return choose_slot(kept, **{**facts, "common_step": -1})


def _of_any_attempt(exited: Any, ctx: Context, event: WorkerExited) -> None:
    job = ctx.state.jobs[event.job_id]
    exited(ctx, replace(event, attempt=job.attempt))


def _careless(compacted: Any, facts: Iterable[Any]) -> Any:
    written = compacted(facts)
    return written if len(written) < 4 else written[:-1]


_STARTS = {CommandKind.START: tuple(s for s in STEPS[CommandKind.START] if s is not Step.KILL)}

CONTROLLER_BUGS = (
    _bug("a batch loses its last fact", (9,), _around(journal, "compacted", _careless)),
    _bug(
        "neither side ends the old workers before a start",
        (1,),
        (attempts, "stops_pending", lambda *_: iter(())),
        (commands, "STEPS", {**STEPS, **_STARTS}),
    ),
    _bug("effects come before the journal", (2,), _around(Context, "take_batch", _journal_last)),
    _bug("a late node is lost", (2,), _around(losses, "late", _silent_when_late)),
    _bug(
        "a cut of our own counts",
        (2,),
        (losses, "_suspect_ourselves", _nothing),
        seeds=40,
        says="blindness",
    ),
    _bug("a deposed leader writes", (3,), (Journal, "check", _nothing)),
    _bug("a quarantine never ends", (4,), (fleet, "_let_time_pass", _nothing)),
    _bug(
        "a person's cordon is removed",
        (5,),
        _around(fleet, "_validated", _without_cordon),
        _around(fleet, "joined", _joins_without_cordon),
    ),
    _bug("retries are refilled by a step", (6,), _around(incidents, "advanced", _refilled)),
    _bug(
        "a failed checkpoint counts",
        (7,),
        _around(incidents, "checkpoint_failed", _believed),
        seeds=40,
    ),
    _bug("the breaker stops nothing", (8,), (nodes, "_breaker_is_open", _no), seeds=40),
    _bug("a note misses the journal", (9,), _around(Context, "note", _untold)),
    _bug(
        "nobody repairs a job",
        (10,),
        (job_progression, "_STEPS", {**job_progression._STEPS, JobState.REPAIRING: _no}),
    ),
    _bug(
        "a rank that lost its peer is blamed",
        (11,),
        _around(blame, "culprits", _first_reporter),
        seeds=40,
    ),
    _bug("orders miss the journal", (2,), _around(Context, "record", _sent_unrecorded)),
    _bug("an attempt is left out", (1,), _around(attempts, "start", _two_attempts)),
    _bug("an excluded node needs no checks", (14,), (fleet, "PASSES_TO_RETURN", 0)),
    _bug("one clean check is enough", (14,), (fleet, "PASSES_TO_RETURN", 1)),
    _bug("a planned stop is a fault", (15,), (planned, "left_in_order", _nothing), seeds=40),
    _bug("peers are said to have seen it", (2,), (losses, "_peers_saw_it", _yes)),
    _bug("a restart judges before agents are back", (2, 10), (losses, "end_reconciling", _nothing)),
    _bug(
        "nodes are used twice",
        (1,),
        (nodes, "placed", lambda ctx, job, node: ctx.state.nodes.get(node)),
    ),
    _bug("the controller's wake-up is dropped", (10,), (Machine, "wake_at", _nothing)),
    _bug(
        "a limit that has passed changes nothing",
        (10,),
        (jobs, "deadline_passed", _nothing),
        seeds=40,
    ),
    _told(
        stories.events_come_twice,
        "the end of a worker of an old attempt counts",
        (16,),
        _around(jobs, "worker_exited", _of_any_attempt),
        seeds=10,
    ),
    _told(
        stories.agent_restarts,
        "nobody asks what became of the workers of a restarted agent",
        (13,),
        (fleet, "_reconcile_workers", _nothing),
    ),
    _told(
        stories.start_is_lost,
        "an order to start outlives its agent",
        (1,),
        (fleet, "_drop_starts", _none_of_them),
    ),
    _told(
        stories.slots_are_read,
        "a slot in host memory is used again too early",
        (7,),
        _around(slots, "choose_slot", _with_common_step_in_use),
    ),
    _told(
        stories.slots_are_read,
        "a step that some rank has missed is taken for common",
        (7,),
        (slots, "common_step", lambda *, highest, **_: highest),
    ),
    _told(
        stories.spare_dies,
        "orders outlive an exclusion",
        (10,),
        (nodes, "close_commands", _nothing),
    ),
    _told(stories.records_expire, "nothing expires", (10,), (retention, "prune", _nothing)),
    _told(
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
    _bug("silence is never reported", (10,), (LivenessTable, "expire", _none_of_them)),
    _bug(
        "a node that is heard again stays silent", (2, 16), (LivenessTable, "heard", _none_of_them)
    ),
    _bug("a stall is never reported", (10,), (Edge, "_stalled", _none_of_them)),
    _bug("a limit on steps is a twentieth", (13,), _around(ProgressTable, "stalled", _limit_cut)),
    _bug(
        "a job that trains has stood",
        (13,),
        (ProgressTable, "stalled", _stood_long),
        (ProgressTable, "is_stalled", _yes),
    ),
    _bug("progress goes unnoticed", (13,), (ProgressTable, "made", _none_of_them)),
    _bug("the edge's wake-up is dropped", (10, 13), (Edge, "wake_at", _nothing)),
    _told(
        stories.host_breaks, "a broken host is not noted", (16,), (Edge, "closed", _none_of_them)
    ),
    _told(
        stories.start_hangs,
        "a late start is not told",
        (16,),
        (HangTable, "start_is_late", _none_of_them),
    ),
    _told(
        stories.heartbeats_are_many,
        "the period that a job wants is not told",
        (16,),
        (Edge, "wanted_period_s", lambda *_: 2.0),
    ),
    _told(
        stories.heartbeats_are_rare,
        "the period that an agent was told is ignored",
        (16,),
        (Edge, "told_period", _nothing),
    ),
    _told(
        stories.job_hangs, "a learned limit is ignored", (13,), (HangTable, "heard", _none_of_them)
    ),
    _bug("silence is reported a level early", (2,), (liveness, "_EVENTS", _a_level_early())),
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
    _bug(
        "an answer comes before the ledger",
        (12,),
        _around(CommandMachine, "_finish", _answered_first),
    ),
    _told(
        stories.stop_overtakes_start,
        "no attempt is fenced off",
        (12,),
        (CommandLedger, "_why_stale", lambda *_: ""),
    ),
    _bug("nobody wakes to give workers up", (12,), (Line, "wake_at", _never)),
    _bug("a stop does not cancel a start", (), (CommandMachine, "_overtake", _nothing)),
    _bug(
        "a stop cancels only older starts", (), _around(CommandMachine, "_overtake", _later_starts)
    ),
    _bug(
        "nobody waits for the killed", (12,), (commands._Running, "alive", property(_none_of_them))
    ),
    _bug("an answer is lost", (12,), _around(CommandMachine, "_finish", _without(Answer))),
    _bug("an answer is given twice", (12,), _around(CommandMachine, "_finish", _twice(Answer))),
    _bug(
        "a command begins before the ledger",
        (12,),
        _around(CommandMachine, "_receive", _begun_at_once),
    ),
    _bug("a repeated command runs again", (12,), _around(CommandLedger, "admit", _run_again)),
    _bug("the end of a worker goes unnoticed", (12,), (WorkerTable, "ended", _nothing)),
    _bug(
        "an end is not reported",
        (12,),
        _around(CommandMachine, "_workers_ended", _without(ReportEnd)),
    ),
    _bug(
        "an end is reported twice",
        (12,),
        _around(CommandMachine, "_workers_ended", _twice(ReportEnd)),
    ),
    _bug("hello has ends that are still to come", (12,), (AgentMachine, "is_end_coming", _no)),
    _bug("what is no news is reported", (12,), _around(Reports, "is_progress_due", _always_due)),
    _bug("an agent's wake-up is dropped", (12,), (CommandMachine, "wake_at", _never)),
    _bug("a new session sends only what is new", (12,), (Line, "welcomed", _welcomed_midway)),
    _bug("one acknowledgement drops everything", (12,), (Line, "acknowledged", _drop_all)),
    _bug("an acknowledgement is ignored", (12,), (Line, "acknowledged", _nothing)),
    _bug("workers are given up at once", (12,), (line, "DEFAULT_ABSENCE_LIMIT_S", 1.0)),
)

BUGS = (*CONTROLLER_BUGS, *EDGE_BUGS, *AGENT_BUGS)
