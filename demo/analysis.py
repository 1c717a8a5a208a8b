"""Figures of the report: pure functions of what was recorded during the two runs.

Losses are compared by their eight bytes, never by their printed form: "the same
curve" means the same bits. What a fault cost is counted from the moment it was
injected, which only the demo knows, to the moments that the controller noted.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# The demo and the controller share a clock; evidence may be stamped by a rank
# that noticed the death of its peer while the signal was still being sent.
CLOCK_SLACK_S = 0.05

ETTR_FORMULA = (
    "ETTR = productive step time / wall time. Productive step time is the sum of the "
    "durations of all steps, each counted once (work that was lost and done again counts "
    "once); wall time runs from the start of the first step to the end of the job."
)


class FaultKind(StrEnum):
    """What the demo does to a running job."""

    WORKER_KILLED = "worker_killed"
    NODE_LOST = "node_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One report of a completed step."""

    step: int
    attempt: int
    loss: float
    duration_s: float
    at_s: float
    eval_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault as the demo carried it out."""

    kind: FaultKind
    at_s: float
    step: int
    node: str
    rank: int | None
    pids: tuple[int, ...]

    @property
    def victim(self) -> str:
        """Who was hit, in words."""
        if self.rank is not None:
            return f"rank {self.rank} on {self.node} (pid {self.pids[0]})"
        return f"{self.node} ({len(self.pids)} processes and its host memory)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of an incident: when it began after the fault, and how long it took."""

    name: str
    start_s: float
    duration_s: float
    detail: str


def settled(reports: Iterable[Step]) -> list[Step]:
    """The report that counts for each step, in step order: the newest attempt's."""
    newest: dict[int, Step] = {}
    for report in reports:
        known = newest.get(report.step)
        if known is None or report.attempt >= known.attempt:
            newest[report.step] = report
    return [newest[step] for step in sorted(newest)]


def bits(value: float) -> bytes:
    """The eight bytes of a double."""
    return struct.pack("<d", value)


def first_difference(
    ours: Sequence[Step], theirs: Sequence[Step], *, steps: int
) -> dict[str, Any] | None:
    """The first step whose loss is missing or differs in any bit; None when there is none.

    Every report is compared, also of steps that were done more than once.
    """
    expected = {report.step: report.loss for report in settled(theirs)}
    found: dict[int, list[Step]] = {}
    for report in ours:
        found.setdefault(report.step, []).append(report)
    for step in range(1, steps + 1):
        if step not in expected or step not in found:
            run = "the fault-free run" if step not in expected else "the run with faults"
            return {"step": step, "why": f"{run} has no loss for it"}
        for report in found[step]:
            if bits(report.loss) != bits(expected[step]):
                return {
                    "step": step,
                    "why": "the losses differ",
                    "attempt": report.attempt,
                    "loss": report.loss,
                    "fault_free_loss": expected[step],
                    "loss_bits": bits(report.loss).hex(),
                    "fault_free_bits": bits(expected[step]).hex(),
                }
    return None


def losses_sha256(reports: Iterable[Step]) -> str:
    """A digest of the bits of the whole curve, in step order."""
    digest = hashlib.sha256()
    for report in settled(reports):
        digest.update(bits(report.loss))
    return digest.hexdigest()


def productive_s(reports: Iterable[Step]) -> float:
    """Seconds of training that counted, each step once."""
    return sum(report.duration_s for report in settled(reports))


def wall_s(reports: Sequence[Step], finished_s: float) -> float:
    """Seconds from the start of the first step to the end of the job."""
    start_s = min(report.at_s - report.duration_s for report in reports)
    return finished_s - start_s


def ettr(reports: Sequence[Step], finished_s: float) -> float:
    """Effective training time ratio, as ETTR_FORMULA has it; 0 when nothing was trained."""
    if not reports:
        return 0.0
    total_s = wall_s(reports, finished_s)
    return min(1.0, productive_s(reports) / total_s) if total_s > 0 else 0.0


def match_incidents(
    faults: Sequence[Injected], incidents: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any] | None]:
    """The incident that each fault led to: the first one after it that names its node."""
    claimed: set[str] = set()
    matched: list[Mapping[str, Any] | None] = []
    for fault in faults:
        found = next(
            (
                incident
                for incident in sorted(incidents, key=lambda item: float(item["opened_s"]))
                if incident["incident_id"] not in claimed and _caused_by(incident, fault)
            ),
            None,
        )
        if found is not None:
            claimed.add(str(found["incident_id"]))
        matched.append(found)
    return matched


def phases(incident: Mapping[str, Any], injected_at_s: float) -> list[Phase]:
    """An incident's timeline as phases; each lasts until the next begins.

    It starts with the injection, which nobody but the demo has seen.
    """
    timeline = [
        {"phase": "injected", "at_s": injected_at_s, "detail": "by the demo, from outside"},
        *sorted(incident["timeline"], key=lambda entry: float(entry["at_s"])),
    ]
    ends = [*(float(entry["at_s"]) for entry in timeline[1:]), None]
    return [
        Phase(
            name=str(entry["phase"]),
            start_s=float(entry["at_s"]) - injected_at_s,
            duration_s=0.0 if end is None else end - float(entry["at_s"]),
            detail=str(entry["detail"]),
        )
        for entry, end in zip(timeline, ends, strict=True)
    ]


def describe_fault(fault: Injected, incident: Mapping[str, Any] | None) -> dict[str, Any]:
    """One entry of the report's `faults`."""
    entry: dict[str, Any] = {
        "kind": fault.kind.value,
        "injected_at_s": fault.at_s,
        "step": fault.step,
        "victim": fault.victim,
        "node": fault.node,
        "rank": fault.rank,
    }
    if incident is None:
        missing = ("detection_s", "diagnosis", "verdict", "cause", "action", "recovery_s")
        entry |= dict.fromkeys((*missing, "steps_redone", "incident_id"))
        return entry | {"timeline": []}
    return entry | {
        "detection_s": float(incident["opened_s"]) - fault.at_s,
        "diagnosis": diagnosis(incident),
        "verdict": incident["reason"],
        "cause": incident["cause"],
        "action": incident["action"],
        "recovery_s": _recovered_after_s(incident, fault.at_s),
        "steps_redone": incident["steps_redone"],
        "incident_id": incident["incident_id"],
        "timeline": [
            {
                "phase": phase.name,
                "start_s": phase.start_s,
                "duration_s": phase.duration_s,
                "detail": phase.detail,
            }
            for phase in phases(incident, fault.at_s)
        ],
    }


def diagnosis(incident: Mapping[str, Any]) -> str:
    """What the signs were: the evidence that named the culprits, earliest first."""
    culprits = set(incident["culprit_nodes"])
    evidence = sorted(incident["evidence"], key=lambda item: float(item["at_s"]))
    telling = [item for item in evidence if item["node"] in culprits] or evidence
    texts = []
    for item in telling[:3]:
        rank = "" if item["rank"] is None else f" rank {item['rank']}"
        texts.append(f"{item['node']}{rank}: {item['detail']}")
    return "; ".join(dict.fromkeys(texts))


def _caused_by(incident: Mapping[str, Any], fault: Injected) -> bool:
    if float(incident["opened_s"]) < fault.at_s - CLOCK_SLACK_S:
        return False
    if incident["cause"] == "storage":
        return False
    named = [*incident["culprit_nodes"], *(item["node"] for item in incident["evidence"])]
    return fault.node in named


def _recovered_after_s(incident: Mapping[str, Any], injected_at_s: float) -> float | None:
    """From the injection to the first step that every rank completed again."""
    if incident["recovery_s"] is None or incident["detection_s"] is None:
        return None
    happened_s = float(incident["opened_s"]) - float(incident["detection_s"])
    return happened_s + float(incident["recovery_s"]) - injected_at_s
