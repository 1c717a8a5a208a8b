"""Reports to the controller about this node's workers: their present step, and how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from controller.agent.core.buffer import Weight
from controller.agent.core.workers import WorkerKey
from controller.agent.mistakes import Mistakes
from controller.agent.observe.reporter import Reporter
from controller.agent.observe.stall_watch import StallWatch
from controller.agent.workers.supervisor import Supervisor
from controller.agent.workers.worker import Worker
from outlast.clock import node_time_s
from outlast.v1 import agents_pb2


class WorkerReports:
    """Says upward what black boxes and the supervisor know."""

    def __init__(
        self,
        emit: Callable[[agents_pb2.AgentEvent, Weight], None],
        supervisor: Supervisor,
        is_end_coming: Callable[[WorkerKey], bool],
        reporter: Reporter,
        stall_watch: StallWatch,
        mistakes: Mistakes,
    ) -> None:
        self._emit = emit
        self._supervisor = supervisor
        self._is_end_coming = is_end_coming
        self._reporter = reporter
        self._stall_watch = stall_watch
        self._mistakes = mistakes
        # How workers ended, counted.
        self.exits = Counter[str]()

    def statuses(self) -> list[agents_pb2.WorkerStatus]:
        """What the workers are, as of the events that the controller has heard."""
        statuses = self._supervisor.statuses()
        for status in statuses:
            if self._is_end_coming(WorkerKey(status.job_id, status.attempt, status.rank)):
                status.running = True
                status.ClearField("exit")
        return statuses

    def summaries(self) -> list[agents_pb2.RankSummary]:
        """Where every rank stands; one that cannot be read is left out."""
        summaries = []
        for worker in self._supervisor.running():
            try:
                summary = self._reporter.summary(worker)
                self._stall_watch.describe(worker, summary)
            except Exception as error:  # noqa: BLE001  # the line to the controller must not end
                self._mistakes.note("heartbeat", worker.key, error)
            else:
                summaries.append(summary)
        return summaries

    def report_end(self, worker: Worker, *, is_last: bool) -> int:
        """Report what a worker completed, then its end; the number of that event."""
        assert worker.exit is not None
        # What it completed comes before the news of its end.
        try:
            self._reporter.worker_ended(worker, is_last=is_last)
        except Exception as error:  # noqa: BLE001  # its end must be reported all the same
            self._mistakes.note("reporter", worker.key, error)
        event = agents_pb2.AgentEvent(
            job_id=worker.job_id,
            attempt=worker.attempt,
            at_s=node_time_s(),
            worker_exited=agents_pb2.WorkerExited(rank=worker.rank, exit=worker.exit),
        )
        self._emit(event, Weight.LASTING)
        code = worker.exit.code
        outcome = "signal" if code < 0 else "success" if code == 0 else "error"
        self.exits[outcome] += 1
        return event.seq
