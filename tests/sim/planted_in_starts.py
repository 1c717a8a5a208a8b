"""Mistakes that an agent could make at a start, and at what it reports of one."""

from __future__ import annotations

import math
from typing import Any

from controller.agent.core import commands, steps
from controller.agent.core.ledger import CommandKind
from controller.agent.core.loaders import DataLoaderTable
from controller.agent.core.reports import Reports
from controller.agent.core.steps import STEPS, StartFacts, Step
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
        "what heartbeats say of steps goes unnoticed",
        (13,),
        (AdvanceTable, "beat", lambda *_: []),
    ),
)
