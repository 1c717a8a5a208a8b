"""Mistakes that could be made at a start, with what was kept for it, and at what is reported."""

from __future__ import annotations

import math
from typing import Any

from controller.agent.core import commands, steps
from controller.agent.core.ledger import CommandKind
from controller.agent.core.loaders import DataLoaderTable
from controller.agent.core.reports import Reports
from controller.agent.core.steps import STEPS, StartFacts, Step
from controller.agent.core.workers import WorkerState, WorkerTable
from controller.core import attempts
from controller.core.edge.advance import AdvanceTable
from tests.sim import stories
from tests.sim.planted import Plant, around, bug, told


def _without_hand_over(is_needed: Any, step: Step, facts: StartFacts | None) -> bool:
    return step is not Step.HAND_OVER and bool(is_needed(step, facts))


def _moved(step: Step, after: Step) -> Plant:
    """A start does a step right after another one."""
    order = [each for each in STEPS[CommandKind.START] if each is not step]
    order.insert(order.index(after) + 1, step)
    return commands, "STEPS", {**STEPS, CommandKind.START: tuple(order)}


def _keeps_all(running: Any) -> list[WorkerState]:
    return [worker for worker in running.targets if worker.is_running]


def _keeps_nobody(ended: Any, table: WorkerTable, key: Any, step: int, **_: bool) -> bool:
    return bool(ended(table, key, step))


START_BUGS = (
    bug(
        "host memory of ranks that are elsewhere stays",
        (12,),
        around(steps, "is_needed", _without_hand_over),
        says="ranks that are elsewhere",
    ),
    bug(
        "folders are there before host memory is handed over",
        (12,),
        _moved(Step.HAND_OVER, Step.FOLDERS),
        says="folders already",
    ),
    bug(
        "copies are fetched after the fork",
        (12,),
        _moved(Step.KEEP_COPIES, Step.FORK),
        says="nobody fetches",
    ),
    bug(
        "a data loader outlives its attempt",
        (12,),
        (DataLoaderTable, "over", lambda *_: []),
        says="has a data loader, and so has",
    ),
    told(
        stories.data_loaders_die,
        "a data loader that was killed stays dead",
        (10,),
        (DataLoaderTable, "wake_at", lambda _: math.inf),
    ),
    told(
        stories.controller_restarts_in_a_start,
        "a new session does not say that the first step is done",
        (10, 13, 16),
        (Reports, "welcomed", lambda *_: None),
    ),
    bug(
        "an order that keeps nobody passes over those that were kept",
        (1, 12),
        (commands._Running, "alive", property(_keeps_all)),
        says="kept",
    ),
    bug(
        "an agent forgets whom it keeps",
        (1, 12),
        around(WorkerTable, "ended", _keeps_nobody),
        says="kept",
    ),
    bug(
        "checks begin beside processes that were kept",
        (1,),
        (attempts, "end_kept", lambda *_: None),
        says="was kept",
    ),
    bug(
        "what heartbeats say of steps goes unnoticed",
        (13,),
        (AdvanceTable, "beat", lambda *_: []),
    ),
)
