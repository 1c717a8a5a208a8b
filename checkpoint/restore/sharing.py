"""Memory that pieces of a checkpoint are read into, which ranks of one node may share.

A rank reads into a few buffers, again and again: fresh memory costs more to be made than
to be filled. Where ranks of one node load together the buffers lie in a file on tmpfs. A
peer maps it and copies what it needs from there, so that bytes neither go through the
network's stack nor lie in memory twice,
which takes about half the time of sending them (4 ranks on 2 cores).

The file is never larger than what its rank reads, has no name for longer than the load,
and is allocated to the last page before anybody writes: a hole that cannot be filled would
kill whoever does.

What does not belong here: when a buffer is full and when it is free again (`redistribute.py`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.core.reading import Unit
from checkpoint.restore.peers import Peers

# Four are being read into (an object store gives one request 50 to 100 MB/s), and as many
# are full: one in hand, the others until the slowest peer has copied them.
NUM_READING = 4
MOST_LENT = 4
_FILE = "redistribute-{rank:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The ranks of this node, and a folder on tmpfs that all of them reach."""

    folder: Path
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Buffer:
    """One of a pool's, and the part of it that is in use."""

    index: int
    content: Tensor


class Pool:
    """The buffers of one rank, in a file where `path` says so. Not thread-safe."""

    def __init__(self, units: Sequence[Unit], path: Path | None = None) -> None:
        sizes = [unit.end - unit.start for unit in units]
        self._buffer_bytes = max(sizes, default=1)
        self._num_bytes = max(1, min(len(sizes), NUM_READING + MOST_LENT)) * self._buffer_bytes
        self._free = list(range(self._num_bytes // self._buffer_bytes))
        self._path = path
        self._map = mmap.mmap(-1, self._num_bytes) if path is None else self._mapped(path)

    def take(self, nbytes: int) -> Buffer | None:
        """A buffer for so many bytes; None when none is free."""
        if not self._free:
            return None
        index = self._free.pop()
        return Buffer(index, _view(self._map, index * self._buffer_bytes, nbytes))

    def give_back(self, buffer: Buffer) -> None:
        """Nobody looks at it any more. A buffer that a read may still write to stays taken."""
        self._free.append(buffer.index)

    @property
    def buffer_bytes(self) -> int:
        """How far apart buffers lie."""
        return self._buffer_bytes

    def close(self) -> None:
        """Take the file's name away.

        Nothing is unmapped here: a read that hangs still has its buffer, and torch's views do
        not keep a mapping from being closed under them. It goes with the last of them.
        """
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _mapped(self, path: Path) -> mmap.mmap:
        path.parent.mkdir(parents=True, exist_ok=True)
        # What an earlier attempt left may be mapped by somebody who still writes to it.
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, self._num_bytes)
            return mmap.mmap(handle, self._num_bytes)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)


class Neighbours:
    """The pools of this node's ranks, as one of them sees the others'."""

    def __init__(self, pool: Pool, folder: Path | None, buffer_bytes: dict[int, int]) -> None:
        self.pool = pool
        self._folder = folder
        self._buffer_bytes = buffer_bytes
        self._maps: dict[int, mmap.mmap] = {}

    @classmethod
    def meet(cls, peers: Peers, node: Node | None, units: Sequence[Unit]) -> Neighbours:
        """Make the pool that this rank reads `units` into. All ranks call it together.

        A rank for whose pool the node has no room sends what it reads, as to other nodes.
        """
        pool: Pool | None = None
        if node is not None and len(node.ranks) > 1:
            with contextlib.suppress(OSError):
                pool = Pool(units, node.folder / _FILE.format(rank=peers.rank))
        shared = 0 if pool is None else pool.buffer_bytes
        pool = pool or Pool(units)
        answers = peers.gather(str(shared).encode())
        ranks = node.ranks if node is not None else frozenset()
        return cls(
            pool,
            None if node is None else node.folder,
            {rank: int(answers[rank]) for rank in sorted(ranks) if int(answers[rank])},
        )

    def shares(self, reader: int, receiver: int) -> bool:
        """Whether what `reader` reads is there for `receiver` without being sent."""
        return reader in self._buffer_bytes and receiver in self._buffer_bytes

    def content(self, reader: int, index: int, nbytes: int) -> Tensor:
        """What lies in a buffer of another rank of this node."""
        if reader not in self._maps:
            assert self._folder is not None, "ranks that share have a folder"
            handle = os.open(self._folder / _FILE.format(rank=reader), os.O_RDWR | os.O_CLOEXEC)
            try:
                self._maps[reader] = mmap.mmap(handle, 0)
            finally:
                os.close(handle)
        return _view(self._maps[reader], index * self._buffer_bytes[reader], nbytes)

    def close(self) -> None:
        """Let go of what others have read, and take away the name of the own pool."""
        self._maps.clear()
        self.pool.close()


def _view(memory: mmap.mmap, start: int, nbytes: int) -> Tensor:
    # The tensor refers to the mapping, so that this lives as long.
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)
