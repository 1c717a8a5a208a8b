"""Counts what agents report in passing and no record keeps: step times, uploads, findings.

Nothing is decided by these figures. They begin at zero with every controller, as
counters of a process do; whoever reads them takes their rise. They are fed from
the edge with what is new there, so a report that an agent repeats is not seen twice,
but two nodes may both tell the last steps of a third. Runs of diagnostics count when
they end, by what was concluded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from controller.families import Distribution
from controller.store.curves import StepRow
from diagnostics.core.finding import CheckVerdict
from diagnostics.core.report import Report
from outlast.ids import JobId, NodeId
from outlast.v1 import agents_pb2, diagnostics_pb2

# From the toy on a laptop to the step of a large model, a third of a decade apart.
STEP_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0)
UPLOAD_BOUNDS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 600.0, 1800.0)
CHECK_BOUNDS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# Stages of a checkpoint's way to storage that can fail, as agents name them; known
# beforehand, so that the first failure is already a rise.
CHECKPOINT_STAGES = ("upload", "commit", "retention")
# Words that an agent chose become labels: only if they look like words, and only so many.
_WORD = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_MAX_WORDS = 64
OTHER = "other"


@dataclass(slots=True)
class JobCounters:
    """What was reported of one job."""

    steps: Distribution = field(default_factory=lambda: Distribution(STEP_BOUNDS_S))
    # Seconds in steps that the job had not completed before.
    goodput_s: float = 0.0
    redone_steps: int = 0
    high_step: int = 0
    last: tuple[int, int] = (0, 0)
    committed_at_s: float | None = None
    committed_size_bytes: int = 0
    stored_bytes: int = 0
    upload: Distribution = field(default_factory=lambda: Distribution(UPLOAD_BOUNDS_S))
    commit: Distribution = field(default_factory=lambda: Distribution(UPLOAD_BOUNDS_S))
    troubles: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys(CHECKPOINT_STAGES, 0))
    )


class Counters:
    """The counts of every job and node, since this controller began."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, JobCounters] = {}
        self._words: set[str] = set()
        # By suite and the verdict that its findings came to.
        self.suites: Counter[tuple[str, str]] = Counter()
        # By node, test and verdict.
        self.findings: Counter[tuple[NodeId, str, str]] = Counter()
        # By the two nodes of a link that a search has named.
        self.bad_links: Counter[tuple[NodeId, NodeId]] = Counter()
        self.checks: dict[str, Distribution] = {}
        # Floating-point operations per second of one worker's matmul, as measured last.
        self.matmul_flops: dict[NodeId, float] = {}

    def job(self, job_id: JobId) -> JobCounters:
        """The counts of a job; all zero when nothing was reported."""
        return self._jobs.get(job_id, JobCounters())

    def keep_only(self, jobs: Iterable[JobId]) -> None:
        """Forget every other job."""
        self._jobs = {job: self._jobs[job] for job in jobs if job in self._jobs}

    def forget_node(self, node: NodeId) -> None:
        """Drop the counts of a node that is on no list any more."""
        self.matmul_flops.pop(node, None)
        for key in [key for key in self.findings if key[0] == node]:
            del self.findings[key]
        for ends in [ends for ends in self.bad_links if node in ends]:
            del self.bad_links[ends]

    def steps(self, rows: Sequence[StepRow], known_step: int) -> None:
        """Steps of a job; up to `known_step` it had been trained when it was first heard of."""
        for row in rows:
            job = self._jobs.get(row.job)
            if job is None:
                job = self._jobs[row.job] = JobCounters(high_step=known_step)
            if (row.attempt, row.step) <= job.last or row.is_left_out:
                continue
            job.last = (row.attempt, row.step)
            job.steps.add(row.duration_s)
            if row.step > job.high_step:
                job.high_step = row.step
                job.goodput_s += row.duration_s
            else:
                job.redone_steps += 1

    def checkpoint_committed(
        self, job_id: JobId, at_s: float, committed: agents_pb2.CheckpointCommitted
    ) -> None:
        """A checkpoint is in storage, whole."""
        job = self._jobs.setdefault(job_id, JobCounters())
        job.committed_at_s = at_s
        job.committed_size_bytes = committed.size_bytes
        job.stored_bytes += committed.size_bytes
        if not committed.total_s:
            # Found in storage: nobody knows what its upload took.
            return
        job.upload.add(committed.upload_s)
        job.commit.add(max(0.0, committed.total_s - committed.upload_s))

    def checkpoint_failed(self, job_id: JobId, stage: str) -> None:
        """A checkpoint did not get to storage, or an old one could not be removed."""
        self._jobs.setdefault(job_id, JobCounters()).troubles[self._word(stage)] += 1

    def suite_ended(self, suite: str, verdict: CheckVerdict) -> None:
        """A node has run a suite."""
        self.suites[self._word(suite), str(verdict)] += 1

    def found(self, node: NodeId, findings: Iterable[diagnostics_pb2.Finding]) -> None:
        """What checks found on a node."""
        for finding in findings:
            test = self._word(finding.test)
            verdict = finding.verdict if finding.verdict in set(CheckVerdict) else OTHER
            self.findings[node, test, verdict] += 1
            self._took(test, finding.duration_s)
            if (finding.metric, finding.unit) == ("matmul_throughput", "GFLOP/s"):
                self.matmul_flops[node] = finding.value * 1e9

    def run_ended(
        self, suite: str, findings: Iterable[diagnostics_pb2.Finding], report: Report
    ) -> None:
        """A run over several nodes has ended.

        What was measured between two nodes speaks for neither of them: of that counts
        what the report says of nodes and links.
        """
        for finding in findings:
            if not finding.peer:
                self.found(NodeId(finding.node), (finding,))
        for node in report.nodes:
            self.suite_ended(suite, node.verdict.verdict)
        for link in report.links:
            self._took(self._word(link.test), link.duration_s)
        for one, other in report.bad_links:
            self.bad_links[NodeId(one), NodeId(other)] += 1

    def _took(self, test: str, duration_s: float) -> None:
        # A verdict that follows from other findings took no time of its own.
        if duration_s > 0:
            self.checks.setdefault(test, Distribution(CHECK_BOUNDS_S)).add(duration_s)

    def _word(self, text: str) -> str:
        if text in self._words:
            return text
        if len(self._words) >= _MAX_WORDS or not _WORD.fullmatch(text):
            return OTHER
        self._words.add(text)
        return text
