"""From a submitted job to its end: its output as it comes, faults as they happen, and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from outlast.cli import output
from outlast.cli.follow import RETRY_S, Follower, Snapshot
from outlast.cli.loglines import Missing
from outlast.cli.run.notes import FAILED, Notes, end_of
from outlast.cli.run.output import Output
from outlast.cli.run.stops import Stops
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast.client import Client
    from outlast.v1.jobs_pb2 import Job

# A signal is answered within this.
_LOOK_S = 0.2
# After the end of a job its output ends within a second or two.
_REST_S = 10.0
_REST_LOOK_S = 0.02
# An agent that was held up connects again within this; one that has ended does not.
_LOST_S = 15.0
_ALL = 2**40
_WAITING = ("QUEUED", "PROVISIONING", "REPAIRING")


class Attendance:
    """One job, from its submission to its end."""

    def __init__(
        self,
        connect: Callable[[], Client],
        job: Job,
        sink: Output,
        stops: Stops,
        *,
        is_local: bool = False,
        least_nodes: int = 0,
        check: Callable[[], None] = lambda: None,
        written: Callable[[], Mapping[tuple[int, int], int] | None] = lambda: None,
    ) -> None:
        """`is_local`: the nodes end with this command. `written` says how many bytes there are by
        attempt and rank, if that can be seen from here. `check` raises what ends the job's
        controller. Where no node can take the place of another one, the job cannot go on without
        `least_nodes`."""
        self._connect = connect
        self._job = job
        self._sink = sink
        self._stops = stops
        self._is_local = is_local
        self._least_nodes = least_nodes
        self._check = check
        self._written = written
        self._follower = Follower(connect, job)
        self._notes = Notes()
        self._is_over = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True, name="run-output")
        self._lost_s: float | None = None
        self._write_error = ""
        self._is_cancelled = False

    def to_end(self) -> int:
        """Follow the job to its end; the exit code.

        Raises:
            CliError: the controller has ended, or refuses to say more.
        """
        self._follower.start()
        self._reader.start()
        try:
            return self._follow()
        finally:
            self._is_over.set()
            self._follower.stop()

    def _follow(self) -> int:
        while True:
            snapshot = self._follower.snapshot()
            say(self._notes.take(snapshot.incidents))
            if snapshot.is_finished or self._is_left(snapshot.job):
                return self._end(snapshot.job)
            if self._stops.is_asked:
                self._cancel()
            if self._stops.count > 1:
                return self._stops.code
            if self._is_short_of_nodes(snapshot):
                needed = f"the script needs {self._least_nodes}"
                say([f"a node of this machine is lost for good, and {needed}; it is given up"])
                return FAILED
            self._check()
            self._follower.wait(_LOOK_S)

    def _is_left(self, job: Job) -> bool:
        """Whether the job waits for a person, and no one has asked for its end."""
        return job.state == "PAUSED" and not self._stops.is_asked

    def _end(self, job: Job) -> int:
        deadline_s = time.monotonic() + _REST_S
        while not self._has_all() and time.monotonic() < deadline_s:
            self._reader.join(_REST_LOOK_S)
        self._is_over.set()
        # Nothing of it may come between what is said now.
        with contextlib.suppress(OSError):
            self._sink.end()
        self._say_last_faults()
        code, messages = end_of(job)
        if self._stops.is_asked and job.state == "CANCELLED":
            return self._stops.code
        say(messages)
        if self._write_error and not code:
            say([f"the script has succeeded; its output is not whole: {self._write_error}"])
            return FAILED
        return code

    def _has_all(self) -> bool:
        """Whether all output of ranks that have ended was shown."""
        return not self._reader.is_alive() or self._written() == self._sink.taken_bytes

    def _say_last_faults(self) -> None:
        """Those that the follower has not looked at: they are a second old at most."""
        with contextlib.suppress(OutlastError), self._connect() as client:
            say(self._notes.take(client.incidents(self._job.job_id, brief=True)))

    def _cancel(self) -> None:
        """Have the script asked to stop, once; it is killed when its grace has passed."""
        if self._is_cancelled:
            return
        self._is_cancelled = True
        # Whoever closed our output, or ended our terminal, reads no advice.
        if self._stops.is_by_hand:
            again = "kills it" if self._is_local else "leaves that to the controller"
            say([f"stopping the script; Ctrl-C once more {again}"])
        try:
            with self._connect() as client:
                client.cancel(self._job.job_id)
        except OutlastError as error:
            say([f"the job cannot be cancelled: {error}"])

    def _is_short_of_nodes(self, snapshot: Snapshot) -> bool:
        connected = sum(node.connected for node in snapshot.nodes)
        is_waiting = snapshot.job.attempt > 0 and snapshot.job.state in _WAITING
        if not is_waiting or connected >= self._least_nodes:
            self._lost_s = None
            return False
        self._lost_s = self._lost_s or time.monotonic()
        return time.monotonic() - self._lost_s >= _LOST_S

    def _read(self) -> None:
        tail_bytes = _ALL
        while not self._is_over.is_set():
            try:
                self._read_once(tail_bytes)
                return
            except OutlastError as error:
                if self._is_over.is_set():
                    return
                say([f"output is missing: {error}"])
            except BrokenPipeError:
                # As a program ends that writes to a pipe which nobody reads. Python would try
                # once more at its end.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                self._stops.ask(signal.SIGPIPE)
                return
            except OSError as error:
                # Another look at the same output would fail as well; the script need not know.
                self._write_error = error.strerror or str(error)
                say([f"output cannot be written: {self._write_error}; the script runs on"])
                return
            tail_bytes = 1
            self._is_over.wait(RETRY_S)

    def _read_once(self, tail_bytes: int) -> None:
        missing = Missing()
        with self._connect() as client:
            for chunk in client.logs(self._job.job_id, follow=True, tail_bytes=tail_bytes):
                if chunk.HasField("missing"):
                    say([missing.take(chunk)])
                else:
                    self._sink.take(chunk.rank, chunk.attempt, chunk.data)


def say(messages: list[str]) -> None:
    """Messages to standard error, as ours where ranks write there, too."""
    for message in messages:
        # A traceback stays as it is.
        text = message if "\n" in message else f"outlast: {message}"
        output.print_message(text)
