"""Agents' replica parts over loopback, and a way to spoil what goes between them.

`python -m tests.checkpoint.copying hold FOLDER` keeps copies and prints its port;
`... send FOLDER PORT` sends what is wanted below FOLDER, slowly. A test kills them.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from checkpoint.core.names import memory_folder, replica_folder
from checkpoint.replicas.encryption import Encryption
from checkpoint.replicas.holder import Duty, Holder
from checkpoint.replicas.sender import Replicator
from checkpoint.replicas.wire import Peer
from checkpoint.restore.restore import sealed_steps
from checkpoint.stage.payload import NamedTensor
from checkpoint.stage.stager import Stager

JOB = "job"
TOKEN = "a token"
# A copy takes some seconds: long enough to be killed in the middle.
SLOW_BYTES_PER_S = 2.0 * 2**20


def make_replicated_stager(
    memory: Path, tensors: list[NamedTensor], *, attempt: int = 1, rank: int = 0
) -> Stager:
    return Stager(
        memory / JOB / memory_folder(rank),
        rank=rank,
        attempt=attempt,
        world_size=2,
        tensors=tensors,
        is_replicated=True,
    )


def save(stager: Stager, step: int) -> None:
    """Save and ask for a copy, as training does."""
    assert stager.save(
        step,
        {"step": step},
        upload=False,
        common_step=step - 1,
        replicate=True,
        replicated_step=stager.newest_replicated,
    )


def steps_held(memory: Path, tensors: list[NamedTensor], rank: int = 0) -> list[int]:
    """Steps whose copies are whole, newest first."""
    return [sealed.step for sealed in sealed_steps(memory / JOB / replica_folder(rank), tensors)]


@dataclass(slots=True)
class Sending:
    """A replicator, and the troubles it has told of."""

    replicator: Replicator
    troubles: list[str] = field(default_factory=list)


@contextlib.contextmanager
def holding(
    memory: Path,
    *,
    attempt: int = 1,
    ranks: tuple[int, ...] = (0,),
    encryption: Encryption | None = None,
) -> Iterator[Holder]:
    token = TOKEN if encryption is None else encryption.token(TOKEN)
    holder = Holder(memory, "127.0.0.1", token, encryption)
    holder.take_duty(JOB, Duty(attempt=attempt, ranks=frozenset(ranks), bytes_per_s=None))
    try:
        yield holder
    finally:
        holder.close()


def peer_at(port: int, token: str = TOKEN) -> Peer:
    return Peer(node="other", address="127.0.0.1", port=port, token=token)


@contextlib.contextmanager
def sending(
    memory: Path,
    peer: Peer | None,
    *,
    attempt: int = 1,
    rank: int = 0,
    bytes_per_s: float | None = None,
) -> Iterator[Sending]:
    troubles: list[str] = []
    replicator = Replicator(
        JOB,
        attempt,
        memory / JOB,
        {rank: peer},
        lambda step, detail: troubles.append(detail),
        bytes_per_s=bytes_per_s,
    )
    replicator.start()
    try:
        yield Sending(replicator, troubles)
    finally:
        replicator.stop()


class Spoiler:
    """Passes bytes on to `port` and back, but for one of them."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.flip_at: int | None = None
        """Which byte towards `port` to change, of each connection."""
        self.flip_back_at: int | None = None
        """Which byte of those that come back."""
        self.cut_at: int | None = None
        """After how many bytes towards `port` to hang up."""
        self.heard = bytearray()
        """All that went towards `port`."""
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            for work in (partial(self._there, near, far), partial(self._back, far, near)):
                self._threads.append(threading.Thread(target=work, daemon=True))
                self._threads[-1].start()

    def _there(self, near: socket.socket, far: socket.socket) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while chunk := bytearray(near.recv(1 << 16)):
                self.heard += chunk
                _flip(chunk, at, self.flip_at)
                at += len(chunk)
                if self.cut_at is not None and at > self.cut_at:
                    break
                far.sendall(chunk)
        for end in (near, far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while chunk := bytearray(far.recv(1 << 16)):
                _flip(chunk, at, self.flip_back_at)
                at += len(chunk)
                near.sendall(chunk)
            near.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def listening_in(port: int) -> Iterator[Spoiler]:
    """Somebody between, who changes nothing."""
    between = Spoiler(port)
    try:
        yield between
    finally:
        between.close()


def _flip(chunk: bytearray, at: int, wanted: int | None) -> None:
    if wanted is not None and at <= wanted < at + len(chunk):
        chunk[wanted - at] ^= 0x40


def main(role: str, folder: Path, port: int) -> None:
    if role == "hold":
        with holding(folder) as holder:
            print(holder.port, flush=True)
            sys.stdin.read()
        return
    with sending(folder, peer_at(port), bytes_per_s=SLOW_BYTES_PER_S):
        print("begun", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int([*sys.argv, "0"][3]))
