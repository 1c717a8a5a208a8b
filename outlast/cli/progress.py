"""Bars on the terminal: of bytes, of things that are counted, and of a simulation's days."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def bytes_bar(name: str, total: int | None, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; what it yields is called with every so many bytes."""
    if quiet or not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    with _of_bytes() as bars:
        task = bars.add_task(name, total=total, rate="")
        yield lambda num_bytes: bars.advance(task, num_bytes)


@contextmanager
def tokens_bar(name: str, total_bytes: int, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; what it yields is called with bytes read and tokens made."""
    if quiet or not sys.stderr.isatty():
        yield lambda num_bytes, num_tokens: None
        return
    with _of_bytes() as bars:
        task = bars.add_task(name, total=total_bytes, rate="")
        made = 0

        def advance(num_bytes: int, num_tokens: int) -> None:
            nonlocal made
            made += num_tokens
            elapsed_s = bars.tasks[0].elapsed or 0.0
            rate = f"{made / elapsed_s:,.0f} tokens/s" if made and elapsed_s else ""
            bars.update(task, advance=num_bytes, rate=rate)

        yield advance


def _of_bytes() -> Progress:
    """Bars of bytes; the field `rate` of a task is shown behind their speed."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


@contextmanager
def count_bar(name: str, total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal; what it yields is called after each of `total` things."""
    if quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(name, total=total)
        yield lambda: bars.advance(task)


@contextmanager
def simulation_bar(days: float, *, quiet: bool) -> Iterator[Callable[[str, float, float], None]]:
    """A progress bar on a terminal; what it yields is called with what runs, and how far it is.

    It begins as one of `days`; given another total, it becomes one of that.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.completed:g} of {task.total:g}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("days", total=days)
        yield lambda what, done, total: bars.update(
            task, description=what, completed=round(done, 1), total=total
        )
