"""Following a job while other things happen: what `watch` and the demo look at.

A thread reads the controller's stream and another look at nodes and incidents
every second; readers take whole snapshots. When the controller goes away the
job trains on without it, so following does not end either: it says so and tries
again, and finds a controller that came back at another port.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outlast.cli.describe import FINISHED
from outlast.cli.errors import CliError
from outlast.errors import OutlastError, RetryableError

if TYPE_CHECKING:
    from outlast.client import Client
    from outlast.v1.common_pb2 import StepReport
    from outlast.v1.incidents_pb2 import Incident
    from outlast.v1.jobs_pb2 import Job
    from outlast.v1.nodes_pb2 import Node

LOOK_PERIOD_S = 1.0
# What is looked at each second: as many nodes as a screen shows, and more incidents than a
# second brings.
MOST_NODES = 16
MOST_INCIDENTS = 50
RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is known of a job now. `steps` holds every report in the order of arrival,
    `nodes` those that need attention first, if there are many, and `incidents` the newest."""

    job: Job
    nodes: tuple[Node, ...] = ()
    num_nodes: int = 0
    incidents: tuple[Incident, ...] = ()
    steps: tuple[StepReport, ...] = ()
    trouble: str = ""
    """Why this is not fresh; empty while the controller answers."""

    @property
    def is_finished(self) -> bool:
        return self.job.state in FINISHED


class Follower:
    """Follows one job until it ends or `stop` is called."""

    def __init__(self, connect: Callable[[], Client], job: Job) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._snapshot = Snapshot(job=job)
        self._steps: list[StepReport] = []
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._failure: OutlastError | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(look,), daemon=True, name=name)
            for name, look in (("follow-job", self._stream), ("follow-fleet", self._look))
        ]

    def start(self) -> None:
        """Begin; returns at once."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let go. The threads end with their next message or with the process."""
        self._stopped.set()

    def snapshot(self) -> Snapshot:
        """What is known now.

        Raises:
            CliError: the controller refuses to say more.
        """
        if self._failure is not None:
            raise CliError(str(self._failure)) from self._failure
        with self._lock:
            return replace(self._snapshot, steps=tuple(self._steps))

    def wait(self, timeout_s: float) -> bool:
        """Whether something changed within `timeout_s` since the last call."""
        changed = self._changed.wait(timeout_s)
        self._changed.clear()
        return changed

    def _run(self, look: Callable[[Client], None]) -> None:
        from outlast.client import RefusedError, UnavailableError

        while not self._is_over():
            try:
                with self._connect() as client:
                    look(client)
            except UnavailableError:
                self._put(trouble="the controller does not answer; workers train on without it")
                self._stopped.wait(RETRY_S)
            except RetryableError as error:
                self._put(trouble=str(error))
                self._stopped.wait(RETRY_S)
            except OutlastError as error:
                # A controller that stops in order cancels its streams.
                if isinstance(error, RefusedError) and error.code.name == "CANCELLED":
                    continue
                # It answers, and will not: asking again changes nothing.
                self._failure = error
                self._changed.set()
                return

    def _stream(self, client: Client) -> None:
        known = self._snapshot.job.job_id
        after_step = max((report.step for report in self._steps), default=-1)
        for update in client.watch(known, after_step=after_step):
            with self._lock:
                self._steps.extend(update.steps)
            self._put(job=update.job if update.HasField("job") else self._snapshot.job, trouble="")
            if self._stopped.is_set():
                return

    def _look(self, client: Client) -> None:
        while not self._is_over():
            job_id = self._snapshot.job.job_id
            nodes, num_nodes = client.some_nodes(MOST_NODES)
            incidents = client.incidents(job_id, newest=MOST_INCIDENTS, brief=True)
            self._put(nodes=nodes, num_nodes=num_nodes, incidents=incidents)
            self._stopped.wait(LOOK_PERIOD_S)

    def _put(self, **changes: object) -> None:
        with self._lock:
            self._snapshot = replace(self._snapshot, **changes)  # type: ignore[arg-type]  # field names are checked by replace
        self._changed.set()

    def _is_over(self) -> bool:
        return self._stopped.is_set() or self._snapshot.is_finished
