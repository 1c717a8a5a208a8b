"""Mistakes that an agent's machine could make, one line each: what is put where.

Each is caught by seeds; see `test_planted_agent_bugs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controller.agent.core import commands, line
from controller.agent.core.actions import Answer
from controller.agent.core.commands import CommandMachine
from controller.agent.core.ledger import Result
from controller.agent.core.line import Line
from controller.agent.core.workers import WorkerTable

_finish = CommandMachine._finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """`name` of `owner` is something else."""

    what: str
    owner: Any
    name: str
    value: Any


def _nothing(*_: object) -> None:
    """What should have happened does not."""


def _finish_silently(machine: CommandMachine, running: Any, result: Result) -> None:
    _finish(machine, running, result)
    machine._actions = [each for each in machine._actions if not isinstance(each, Answer)]


def _finish_loudly(machine: CommandMachine, running: Any, result: Result) -> None:
    _finish(machine, running, result)
    machine._actions += [each for each in machine._actions[-1:] if isinstance(each, Answer)]


def _welcomed_midway(of: Line[Any]) -> None:
    of.is_connected, of._give_up_s = True, math.inf


def _drop_all(of: Line[Any], seq: int) -> None:
    of.buffer.acknowledge(of.buffer.last_seq)


def _no_one_alive(running: Any) -> list[Any]:
    return []


def _never(*_: object) -> float:
    return math.inf


def _bug(what: str, owner: Any, name: str, value: Callable[..., Any] | property | float) -> Bug:
    return Bug(what=what, owner=owner, name=name, value=value)


AGENT_BUGS = (
    _bug("a stop does not cancel a start", CommandMachine, "_overtake", _nothing),
    _bug("nobody waits for the killed", commands._Running, "alive", property(_no_one_alive)),
    _bug("an answer is lost", CommandMachine, "_finish", _finish_silently),
    _bug("an answer is given twice", CommandMachine, "_finish", _finish_loudly),
    _bug("the end of a worker goes unnoticed", WorkerTable, "ended", _nothing),
    _bug("a wake-up is dropped", CommandMachine, "wake_at", _never),
    _bug("a new session sends only what is new", Line, "welcomed", _welcomed_midway),
    _bug("one acknowledgement drops everything", Line, "acknowledged", _drop_all),
    _bug("an acknowledgement is ignored", Line, "acknowledged", _nothing),
    _bug("workers are given up at once", line, "DEFAULT_ABSENCE_LIMIT_S", 1.0),
)
