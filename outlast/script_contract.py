"""What an agent gives to a rank that is a program of the user's own.

What does not belong here: which program that is (`outlast.script_command`), and how a process
becomes it (`outlast.script.entry`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptContract:
    """A program as one rank, as torchrun would start it."""

    command: tuple[str, ...]
    """To execute: a program and its arguments."""
    python: tuple[str, ...]
    """What to run within this interpreter instead: a script, or "-m" and a module, and its
    arguments. Empty where the command must be executed."""
    note: str
    """Why it is executed though it is a Python script; "" where there is nothing to say."""
    environment: Mapping[str, str] = field(repr=False)
    """All of it, torchrun's variables and secrets included."""
    cwd: str
    """An absolute path."""
    stop_signal: int
    """Asks it to stop."""


def read_script(document: object) -> ScriptContract:
    """What `dataclasses.asdict` gave, by way of JSON.

    Raises:
        TypeError: it is nothing of the kind.
    """
    match document:
        case {
            "command": [*command],
            "python": [*python],
            "note": str(note),
            "environment": {**environment},
            "cwd": str(cwd),
            "stop_signal": int(stop_signal),
            **more,
        } if not more:
            return ScriptContract(
                command=_texts(command),
                python=_texts(python),
                note=note,
                environment=dict(
                    zip(_texts(environment), _texts(environment.values()), strict=True)
                ),
                cwd=cwd,
                stop_signal=stop_signal,
            )
    raise TypeError("fields are missing or unknown")


def _texts(items: Iterable[object]) -> tuple[str, ...]:
    found: list[str] = []
    for item in items:
        if not isinstance(item, str):
            raise TypeError(f"{item!r} is no string")
        found.append(item)
    return tuple(found)
