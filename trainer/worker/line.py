"""A rank's line to its agent: asked to leave its attempt, it does so, and may join another.

A thread listens, because the one that trains may be waiting for a rank that is gone. To free it,
another ends the connections of this process, so that every operation under way fails. A rank that
is to complete its step first has nothing under way when it leaves.

What a GPU waits for with others is aborted first. It ends then as if it had come, with whatever its
tensors hold: who reads a number from the device, or keeps what it computed, asks `check`, or
`is_void`, behind that.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Collection

from outlast.worker_contract import WorkerContract
from outlast.worker_line import (
    MAX_LINE_BYTES,
    Join,
    Leave,
    Left,
    connect,
    from_worker,
    read_from_agent,
)
from trainer.parallel.comm import PeerLostError
from trainer.parallel.connections import EndedConnections

# A connection that is made just now is ended by the next look.
_LOOK_EVERY_S = 0.005
# Once this rank makes none any more. Its core is wanted by those that are still to leave.
_DRAIN_EVERY_S = 0.01


class AgentLine:
    """One rank's end, for as long as its process lives."""

    def __init__(self, address: str, *, attempt: int, spared: Collection[str] = ()) -> None:
        """Connect in the background. An agent that is gone asks nothing.

        `spared`: sockets that are no connections to other ranks (`connections.open_sockets`).
        """
        self._attempt = attempt
        self._spared = spared
        self._leaving = threading.Event()
        # Set while steps are done, and once the one under way is to be the last.
        self._trains = threading.Event()
        self._stopping = threading.Event()
        self._has_left = threading.Event()
        self._joining = threading.Event()
        # Ends connections while this rank leaves, and until it joins another attempt.
        self._ending: threading.Thread | None = None
        self._beginning = threading.Lock()
        # Of what a device has under way with others; None where there is none, or no more.
        self._abort: Callable[[], None] | None = None
        self._abort_error: RuntimeError | None = None
        self._is_void = False
        self._contracts: queue.SimpleQueue[WorkerContract | None] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        threading.Thread(
            target=self._listen, args=(address,), name="agent-line", daemon=True
        ).start()

    @property
    def is_leaving(self) -> bool:
        """Whether the agent has asked this rank to give its attempt up."""
        return self._leaving.is_set()

    def is_asked_within(self, timeout_s: float) -> bool:
        """Whether the agent asks this rank to give its attempt up, at the latest after so long."""
        return self._leaving.wait(timeout_s)

    @property
    def is_open(self) -> bool:
        """Whether there is an agent that could ask for more."""
        return self._socket is not None

    @property
    def is_stopping(self) -> bool:
        """Whether the agent has asked this rank to leave once the present step is complete."""
        return self._stopping.is_set()

    @property
    def is_void(self) -> bool:
        """Whether what a device computed with others may be nothing, as that was aborted."""
        return self._is_void

    def check(self) -> None:
        """Behind what other ranks have a part in.

        Raises:
            PeerLostError: it may have come to nothing.
        """
        if self._is_void:
            raise PeerLostError("this rank leaves its attempt")

    def holds(self, abort: Callable[[], None]) -> None:
        """From now on, until this rank has left, `abort` ends what its device has under way."""
        with self._beginning:
            self._abort = abort
            if self._ending is not None:
                self._abort_held()

    def abort(self) -> None:
        """End what the device of this rank has under way; there is nothing more to come of it.

        Raises:
            RuntimeError: that failed, now or before.
        """
        with self._beginning:
            self._abort_held()
        if self._abort_error is not None:
            raise self._abort_error

    def trains(self) -> None:
        """From now on there is a step to complete; before, there is nothing to wait for."""
        self._trains.set()

    def leave(self) -> None:
        """Have every operation under way fail, here and, later, where others wait for this rank."""
        with self._beginning:
            if self._ending is not None:
                return
            # Before its connections, which NCCL uses while it aborts.
            self._abort_held()
            connections = EndedConnections(self._spared)
            # Before this rank lets go of them: its peers are not to see that yet.
            connections.look()
            self._ending = threading.Thread(
                target=self._end, args=(connections,), name="ending", daemon=True
            )
            self._ending.start()

    def left(self, *, completed: bool) -> None:
        """Say that this rank holds nothing of its attempt any more, and whether its last step is
        complete."""
        self._has_left.set()
        line = self._socket
        if line is not None:
            with contextlib.suppress(OSError):
                line.sendall(from_worker(Left(self._attempt, completed)))

    def next_contract(self, timeout_s: float) -> WorkerContract | None:
        """What this rank is to do next; None when its agent is gone, or says nothing in time."""
        try:
            contract = self._contracts.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if contract is not None:
            if self._ending is not None:
                # Nothing of the next attempt may be among what it ends.
                self._joining.set()
                self._ending.join()
                self._ending = None
            self._joining.clear()
            self._has_left.clear()
            self._is_void = False
        return contract

    def _abort_held(self) -> None:
        abort, self._abort = self._abort, None
        if abort is None:
            return
        self._is_void = True
        try:
            abort()
        except RuntimeError as error:
            self._abort_error = error

    def _listen(self, address: str) -> None:
        try:
            line = connect(address)
        except OSError:
            self._contracts.put(None)
            return
        with line, line.makefile("rb") as lines:
            with contextlib.suppress(OSError):
                self._socket = line
                for text in iter(lambda: lines.readline(MAX_LINE_BYTES), b""):
                    self._hear(text)
            self._socket = None
        self._contracts.put(None)

    def _hear(self, text: bytes) -> None:
        match read_from_agent(text):
            case Leave(attempt=attempt, after_step=after_step) if attempt == self._attempt:
                if after_step and self._trains.is_set():
                    self._stopping.set()
                else:
                    self._leaving.set()
                    self.leave()
            case Leave():
                pass
            case Join(contract=contract):
                self._attempt = contract.attempt
                for asked in (self._leaving, self._trains, self._stopping):
                    asked.clear()
                self._contracts.put(contract)

    def _end(self, connections: EndedConnections) -> None:
        while not self._has_left.wait(_LOOK_EVERY_S):
            connections.look()
        connections.look()
        while not self._joining.wait(_DRAIN_EVERY_S):
            connections.drain()
        connections.close()
