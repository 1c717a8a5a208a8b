"""What every check gets and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diagnostics.core.finding import Measurement
from diagnostics.core.plans import Effort


class SkipCheckError(Exception):
    """The check does not apply here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where and how hard to check."""

    node: str
    workers: int
    # "auto" takes CUDA where there is a device for it.
    device: str
    # "" when no job's checkpoints are written from here.
    checkpoint_url: str
    # Module that tries any such URL (`python -m MODULE URL`); "" when there is none.
    storage_probe: str
    effort: Effort
    # Where counters of earlier checks are kept, to see what has risen since.
    counters_file: Path


Emit = Callable[[Measurement], None]
# Runs in a child process of its own and emits each measurement as it comes.
CheckFunction = Callable[[Context, Emit], None]
