"""Each checker catches the bug that it is there for.

A checker that cannot fail is worth nothing, so every test here breaks the machine
in one place and demands that some of a few seeds say which invariant fell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import pytest

from controller.agent.core.ledger import CommandKind
from controller.agent.core.steps import STEPS, Step
from controller.core import attempts, blame, events, fleet, incidents, losses, nodes, steps
from controller.core.batches import compacted
from controller.core.context import Context
from controller.core.effects import Effect, Persist
from controller.core.facts import Fact
from controller.core.records import (
    IncidentRecord,
    JobRecord,
    NodeRecord,
)
from controller.core.states import JobState
from controller.core.verdict import Facts, root_failure
from controller.sim import journal
from controller.sim.journal import Journal
from controller.sim.run import run_seed
from controller.sim.violation import Violation
from outlast.ids import NodeId
from tests.sim.bugs import lose_nodes_at_once

MAX_SEEDS = 40


def _caught(invariants: Iterable[int], first: int = 0) -> str:
    """The first violation of some seeds; it must be of one of these invariants."""
    for seed in range(first, first + MAX_SEEDS):
        try:
            run_seed(seed)
        except Violation as violation:
            told = str(violation)
            assert any(told.startswith(f"invariant {number} ") for number in invariants), told
            return told
    pytest.fail(f"no seed of {MAX_SEEDS} noticed the planted bug")


def test_starting_beside_old_workers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides must fail: the agent kills what the controller forgot to stop."""

    starts = tuple(step for step in STEPS[CommandKind.START] if step is not Step.KILL)
    monkeypatch.setattr(attempts, "stops_pending", lambda _ctx, _job: iter(()))
    monkeypatch.setitem(
        cast("dict[CommandKind, tuple[Step, ...]]", STEPS), CommandKind.START, starts
    )
    _caught((1,))


def test_acting_before_the_journal_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    take_batch = Context.take_batch

    def journal_last(ctx: Context) -> list[Effect]:
        batch = take_batch(ctx)
        return sorted(batch, key=lambda effect: isinstance(effect, Persist))

    monkeypatch.setattr(Context, "take_batch", journal_last)
    _caught((2,))


def test_losing_a_node_after_a_short_silence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_nodes_at_once(monkeypatch)
    _caught((2,))


def test_never_suspecting_ourselves_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_suspect_ourselves", lambda _ctx: None)
    told = _caught((2,))
    assert "blindness" in told


def test_a_deposed_leader_whose_writes_land_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "check", lambda _journal, _term: None)
    _caught((3,))


def test_a_batch_that_loses_a_fact_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(facts: Iterable[Fact]) -> list[Fact]:
        written = compacted(facts)
        return written if len(written) < 4 else written[:-1]

    monkeypatch.setattr(journal, "compacted", careless)
    _caught((9,))


def test_a_quarantine_that_never_ends_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_let_time_pass", lambda _ctx: None)
    _caught((4,))


def test_removing_a_persons_cordon_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def helpful(ctx: Context, node: NodeRecord, *, passed: bool, detail: str) -> None:
        validated(ctx, ctx.put(replace(node, cordoned=False)), passed=passed, detail=detail)

    def rejoined(ctx: Context, event: events.NodeJoined) -> None:
        joined(ctx, event)
        ctx.put(replace(ctx.state.nodes[event.node], cordoned=False))

    validated, joined = fleet._validated, fleet.joined
    monkeypatch.setattr(fleet, "_validated", helpful)
    monkeypatch.setattr(fleet, "joined", rejoined)
    _caught((5,))


def test_refilling_the_retry_budget_without_a_checkpoint_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def generous(ctx: Context, job: JobRecord, event: events.JobAdvanced) -> None:
        job = ctx.put(replace(job, retry_left=job.plan.retry_budget))
        advanced(ctx, job, event)

    advanced = incidents.advanced
    monkeypatch.setattr(incidents, "advanced", generous)
    _caught((6,))


def test_believing_in_an_uncommitted_checkpoint_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def credulous(ctx: Context, event: events.CheckpointFailed) -> None:
        incidents.checkpoint_committed(
            ctx, events.CheckpointCommitted(job_id=event.job_id, step=event.step)
        )

    monkeypatch.setattr(incidents, "checkpoint_failed", credulous)
    _caught((7,))


def test_an_open_breaker_that_stops_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_breaker_is_open", lambda _ctx: False)
    _caught((8,))


def test_a_decision_that_misses_the_journal_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(
        ctx: Context, incident: IncidentRecord, *_: object, **__: object
    ) -> IncidentRecord:
        changed = replace(incident, timeline=())
        ctx.state.incidents[incident.incident] = changed
        return changed

    monkeypatch.setattr(Context, "note", forgetful)
    _caught((9,))


def test_a_job_that_is_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 10: nobody looks at the job again once it waits for nodes."""
    monkeypatch.setitem(steps._STEPS, JobState.REPAIRING, lambda _ctx, _job: False)
    _caught((10,))


def test_blaming_the_rank_that_lost_its_peer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_reporter(facts: Facts) -> tuple[NodeId, ...]:
        root = root_failure(facts.evidence)
        return () if root is None or root.node is None else (root.node,)

    monkeypatch.setattr(blame, "culprits", first_reporter)
    _caught((11,))
