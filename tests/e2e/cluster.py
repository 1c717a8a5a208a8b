"""The whole product in real processes: a controller, local nodes, trained jobs, real faults."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from outlast.blackbox import Present, Reader
from outlast.client import Client
from outlast.v1 import incidents_pb2, jobs_pb2

T = TypeVar("T")
DEADLINE_S = 120.0
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")

# Two ranks on two nodes; a step takes some milliseconds.
TINY: dict[str, Any] = {
    "name": "tiny",
    "steps": 60,
    "model": {"layers": 1, "hidden": 32, "heads": 2, "seq_len": 32},
    "parallel": {"dp": 2, "micro_batch": 2},
    "data": {"global_batch": 4, "max_bytes": 65536},
    "optimizer": {"schedule": {"warmup_steps": 5}},
    "resources": {"workers_per_node": 1, "device": "cpu"},
    "checkpoint": {"storage_interval_steps": 20},
    "recovery": {
        "heartbeat_period_s": 0.5,
        "heartbeat_late_s": 2,
        "heartbeat_lost_s": 4,
        "heartbeat_silent_s": 15,
        "stop_timeout_s": 10,
    },
    "eval": {"interval_steps": None},
}


def spec(**changes: Any) -> dict[str, Any]:
    """`TINY` with some sections changed; a section given as a mapping is merged."""
    document = dict(TINY)
    for key, value in changes.items():
        merge = isinstance(value, dict) and isinstance(document.get(key), dict)
        document[key] = {**document[key], **value} if merge else value
    return document


class Cluster:
    """A controller's state folder and a client that speaks to it."""

    def __init__(self, state_dir: Path, address: Callable[[], str]) -> None:
        self.state_dir = state_dir
        self._address = address
        # Of which start of the controller, at which address. Waiting means many calls, and a
        # connection for each costs four times what the calls do.
        self._known: tuple[str, int] | None = None
        self._client: Client | None = None

    @property
    def client(self) -> AbstractContextManager[Client]:
        """A client of the controller as it runs now: it may have started anew."""
        known = (self._address(), self._started_ns())
        if self._client is None or known != self._known:
            if self._client is not None:
                self._client.close()
            self._known, self._client = known, Client(known[0])
        return nullcontext(self._client)

    def _started_ns(self) -> int:
        try:
            return (self.state_dir / "controller.json").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def submit(self, **changes: Any) -> str:
        with self.client as client:
            return client.submit(spec(**changes)).job_id

    def job(self, job_id: str) -> jobs_pb2.Job:
        with self.client as client:
            return client.get(job_id)[0]

    def incidents(self, job_id: str) -> tuple[incidents_pb2.Incident, ...]:
        with self.client as client:
            return client.incidents(job_id)

    def losses(self, job_id: str) -> dict[int, float]:
        """The loss of every step, as the controller keeps it."""
        with self.client as client:
            return {report.step: report.loss for report in client.get(job_id, with_steps=True)[1]}

    def wait_state(self, job_id: str, *states: str, within_s: float = DEADLINE_S) -> jobs_pb2.Job:
        """Wait until the job is in one of these states; fails when it ends in another."""

        def reached() -> jobs_pb2.Job | None:
            job = self.job(job_id)
            ended = job.state in ENDED
            assert job.state in states or not ended, f"{job.state}: {job.reason}\n{job.error}"
            return job if job.state in states else None

        return wait_for(reached, f"{job_id} to be {' or '.join(states)}", within_s)

    def wait_nodes(self, count: int) -> None:
        """Wait until so many nodes are connected."""

        def joined() -> bool:
            with self.client as client:
                return sum(node.connected for node in client.nodes()) >= count

        wait_for(joined, f"{count} nodes to join")

    def wait_step(self, job_id: str, step: int) -> None:
        wait_for(lambda: self.job(job_id).step >= step, f"{job_id} to reach step {step}")

    def presents(self, job_id: str, attempt: int) -> list[Present]:
        """What every rank of an attempt last noted in its black box."""
        paths = self.state_dir.glob(f"nodes/*/jobs/{job_id}/a{attempt}/rank-*.blackbox")
        found = []
        for path in paths:
            try:
                box = Reader(path)
            except (FileNotFoundError, ValueError):
                continue
            found.append(box.present())
            box.close()
        return sorted(found, key=lambda present: present.rank)

    def wait_gone(self, pids: Sequence[int]) -> None:
        """Wait until none of these processes is there."""
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"{pids} to end")

    def kill_rank(self, job_id: str, attempt: int, rank: int) -> None:
        """SIGKILL a worker."""
        os.kill(self.presents(job_id, attempt)[rank].pid, signal.SIGKILL)

    def train_with_a_killed_worker(self, speed_up: Callable[[], None]) -> str:
        """Have `TINY`, which is slow until it is sped up, lose rank 1 and end; its name."""
        job_id = self.submit()
        self.wait_step(job_id, 10)
        self.kill_rank(job_id, attempt=1, rank=1)
        speed_up()
        job = self.wait_state(job_id, "SUCCEEDED")
        assert job.attempt == 2
        (incident,) = self.incidents(job_id)
        assert (incident.cause, incident.action) == ("worker_killed", "restart_in_place")
        assert incident.steps_redone <= 1
        return job_id

    def clear(self) -> str:
        """Cancel every job that has not ended; what became of all, with their incidents."""
        lines = []
        try:
            with self.client as client:
                for job in client.list():
                    lines.append(f"{job.job_id}: {job.state}, attempt {job.attempt}: {job.reason}")
                    lines += (
                        f"  {each.state} {each.cause}: {each.reason}"
                        for each in client.incidents(job.job_id)
                    )
                    if job.state not in ENDED:
                        client.cancel(job.job_id)
                        self.wait_state(job.job_id, *ENDED)
        # Of a test that has failed, whose controller may be gone.
        except Exception as error:  # noqa: BLE001
            lines.append(f"{type(error).__name__}: {error}")
        return "\n".join(lines)


def wait_for(condition: Callable[[], T | None], what: str, within_s: float = DEADLINE_S) -> T:
    """The first true value of a condition, looked at often."""
    deadline_s = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"waited {within_s:.0f} s for {what}"
        time.sleep(0.05)
