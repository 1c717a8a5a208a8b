"""Where the output of ranks goes: to standard output, and to files as torchrun lays them out.

A rank's standard output and standard error are one stream here, in the order in which they were
written.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from outlast.cli.loglines import Line, Lines
from outlast.torchrun.flags import RunOptions, StreamChoice, Streams

FILE_NAME = "output.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is done with the output of the ranks of a job."""

    workers_per_node: int
    num_ranks: int
    redirects: StreamChoice = field(default_factory=StreamChoice)
    tee: StreamChoice = field(default_factory=StreamChoice)
    shown_local_ranks: tuple[int, ...] = ()

    @classmethod
    def by(cls, options: RunOptions, workers_per_node: int) -> Wanted:
        """As the flags say."""
        return cls(
            workers_per_node=workers_per_node,
            num_ranks=options.max_nodes * workers_per_node,
            redirects=options.redirects,
            tee=options.tee,
            shown_local_ranks=options.shown_local_ranks,
        )

    @property
    def has_files(self) -> bool:
        """Whether any rank's output goes to a file."""
        locals_ = range(self.workers_per_node)
        return any(self.is_kept(rank) for rank in locals_)

    def is_kept(self, rank: int) -> bool:
        """Whether a rank's output goes to a file."""
        local = rank % self.workers_per_node
        return (self.redirects.of(local) | self.tee.of(local)) is not Streams.NONE

    def is_shown(self, rank: int) -> bool:
        """Whether a rank's output is shown."""
        local = rank % self.workers_per_node
        is_chosen = not self.shown_local_ranks or local in self.shown_local_ranks
        is_redirected = self.redirects.of(local) is not Streams.NONE
        return is_chosen and (not is_redirected or self.tee.of(local) is not Streams.NONE)


class Output:
    """Takes what ranks write; lines of several ranks have the rank before them."""

    def __init__(self, wanted: Wanted, folder: Path | None, shown: IO[bytes] | None = None) -> None:
        """`folder` is where files go, one below it for each attempt and rank; `shown` takes the
        place of standard output."""
        self._wanted = wanted
        self._folder = folder
        self._shown = shown
        self._lines = Lines()
        # By rank: the attempt that wrote last.
        self._attempts: dict[int, int] = {}
        self._files: dict[int, IO[bytes]] = {}
        self.taken_bytes: dict[tuple[int, int], int] = {}
        """By attempt and rank."""

    def take(self, rank: int, attempt: int, data: bytes) -> None:
        """A piece of a rank's output.

        Raises:
            OSError: it cannot be written.
        """
        if self._attempts.get(rank) != attempt:
            self._begin(rank, attempt)
        file = self._files.get(rank)
        if file is not None:
            file.write(data)
            file.flush()
        if self._wanted.is_shown(rank):
            if self._wanted.num_ranks == 1:
                self._show(data)
            else:
                self._show_lines(self._lines.take(rank, data))
        if data:
            key = (attempt, rank)
            self.taken_bytes[key] = self.taken_bytes.get(key, 0) + len(data)

    def end(self) -> None:
        """Write lines that were never ended."""
        self._show_lines(self._lines.rest())
        for file in self._files.values():
            file.close()

    def _begin(self, rank: int, attempt: int) -> None:
        self._show_lines(self._lines.rest(rank))
        self._attempts[rank] = attempt
        old = self._files.pop(rank, None)
        if old is not None:
            old.close()
        if self._folder is not None and self._wanted.is_kept(rank):
            # torchrun counts from 0.
            place = self._folder / f"attempt_{attempt - 1}" / str(rank)
            place.mkdir(parents=True, exist_ok=True)
            self._files[rank] = (place / FILE_NAME).open("ab")

    def _show_lines(self, lines: list[Line]) -> None:
        if lines:
            self._show("".join(f"{line.labelled()}\n" for line in lines).encode(errors="replace"))

    def _show(self, data: bytes) -> None:
        shown = sys.stdout.buffer if self._shown is None else self._shown
        shown.write(data)
        shown.flush()
