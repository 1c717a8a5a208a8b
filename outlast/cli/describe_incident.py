"""What incidents are, in words: pure functions from messages to text.

Reason, evidence and timeline of an incident often quote each other; what was said
once is left out further down. `--json` has all of it. Nothing here prints.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from outlast.cli.describe import clock, cost
from outlast.durations import duration

if TYPE_CHECKING:
    from outlast.v1.incidents_pb2 import Evidence, Incident

# Every rank of a job may have something to say, at length.
MAX_STACK = 24
MAX_EVIDENCE = 4
MAX_DETAIL = 160
# Between two clauses of a reason.
_CLAUSES = re.compile(r"((?:; |: )(?=\S))")
_AS_LOGGED = "only logged"


def count(incidents: list[Incident]) -> str:
    """`2 incidents`, `1 incident and 3 notes`."""
    num_notes = sum(incident.is_note for incident in incidents)
    found = _number(len(incidents) - num_notes, "incident")
    return f"{found} and {_number(num_notes, 'note')}" if num_notes else found


def action(incident: Incident) -> str:
    """What was done, in words."""
    if incident.action:
        return incident.action.replace("_", " ")
    if incident.is_note:
        return _AS_LOGGED
    return "" if incident.state == "CLOSED" else "not decided yet"


def short_id(incident: Incident) -> str:
    """What stands behind the job's id: `i2`."""
    return incident.incident_id.rpartition(".")[2]


def summary(incident: Incident, now_s: float) -> str:
    """Where it was, what was done and what it cost, for a list."""
    where = " ".join(incident.culprit_nodes)
    parts = [": ".join(filter(None, (where, action(incident))))]
    if incident.is_note:
        parts.append(seen(incident, now_s))
    elif incident.HasField("recovery_s"):
        parts.append(f"training again after {duration(incident.recovery_s)}")
    if incident.HasField("steps_redone"):
        parts.append(f"{_number(incident.steps_redone, 'step')} redone")
    return ", ".join(filter(None, parts))


def seen(incident: Incident, now_s: float) -> str:
    """How often a detector found it; "" for once."""
    if incident.count < 2:
        return ""
    last = f", last {duration(now_s - incident.last_s)} ago" if incident.HasField("last_s") else ""
    return f"seen {incident.count:,} times{last}"


def incident_lines(incident: Incident, now_s: float, *, said: str = "") -> list[tuple[str, str]]:
    """An incident as its story: (label, text), in order. What was `said` before is left out."""
    lines = [
        ("incident", f"{incident.incident_id}  {incident.state}"),
        ("when", f"{clock(incident.opened_s)}, in attempt {incident.attempt}"),
        ("cause", incident.cause.replace("_", " ") or "not known yet"),
        ("action", action(incident) or "none"),
    ]
    reason = _news(incident.reason or "the verdict is not in yet", said)
    if reason:
        lines.append(("because", reason))
    if incident.count > 1:
        lines.append(("seen", seen(incident, now_s).removeprefix("seen ")))
    said = f"{said} {incident.reason}"
    if any(node not in said for node in incident.culprit_nodes):
        lines.append(("nodes", ", ".join(incident.culprit_nodes)))
    evidence = [_evidence(item) for item in incident.evidence if item.kind != "stacks"]
    signs = [_cut(sign) for sign in evidence if not _is_said(sign, said)]
    # Of what is found again and again, the newest say how it is now.
    shown = signs[-MAX_EVIDENCE:] if incident.is_note else signs[:MAX_EVIDENCE]
    lines += [("evidence", sign) for sign in shown]
    if len(signs) > len(shown):
        lines.append(("evidence", f"and {len(signs) - len(shown)} more (all: --json)"))
    lines += [("stacks", line) for item in incident.evidence for line in _stacks(item)]
    if incident.diagnostic_run:
        lines.append(("checks", _checks(incident)))
        lines.append(("checks", f"outlast diagnose --show {incident.diagnostic_run}"))
    said = " ".join((said, *evidence))
    lines += [("timeline", line) for line in timeline_lines(incident, said=said)]
    lines.append(("cost", "none: training went on" if incident.is_note else cost(incident)))
    return lines


def timeline_lines(incident: Incident, *, said: str = "") -> list[str]:
    """Each phase, when it began after the fault, and what is new in what was said about it."""
    if not incident.timeline:
        return []
    start_s = incident.timeline[0].at_s
    lines = []
    for entry in incident.timeline:
        # Where the time went is the timeline's own.
        detail = entry.detail if entry.phase == "first_step" else _news(entry.detail, said)
        said = f"{said} {' '.join(entry.detail.split())}"
        detail = _cut(" ".join(detail.split()))
        lines.append(f"+{entry.at_s - start_s:8.3f} s  {entry.phase:<13} {detail}".rstrip())
    return lines


def _news(text: str, said: str) -> str:
    """The clauses of `text` that were not said before, in their order."""
    if not said:
        return text
    first, *rest = _CLAUSES.split(" ".join(text.split()))
    kept = "" if _is_said(first, said) else first
    for separator, clause in zip(rest[::2], rest[1::2], strict=True):
        if not _is_said(clause, said):
            kept += (separator if kept else "") + clause
    return kept


def _is_said(clause: str, said: str) -> bool:
    """Whether all of it stands in what was said, wherever its node and rank stand there."""
    clauses = [part for part in _CLAUSES.split(clause)[::2] if part.strip()]
    return all(part in said or _is_place_said(part, said) for part in clauses)


def _is_place_said(clause: str, said: str) -> bool:
    """Whether a node and its rank are named, in whichever order."""
    node, _, rank = clause.partition(" rank ")
    return rank.isdigit() and node in said and re.search(rf"\brank {rank}\b", said) is not None


def _checks(incident: Incident) -> str:
    """What the checks after the fault said, the bad first."""
    bad = [f"bad link {link.node}--{link.peer}" for link in incident.bad_links]
    verdicts = [check.verdict for check in incident.node_checks]
    bad += [f"{c.node}: {c.verdict}" for c in incident.node_checks if c.verdict != "pass"]
    if not verdicts:
        return "under way"
    return ", ".join([*bad[:MAX_EVIDENCE], f"{verdicts.count('pass')} of {len(verdicts)} pass"])


def _evidence(item: Evidence) -> str:
    rank = f" rank {item.rank}" if item.HasField("rank") else ""
    detail = " ".join(item.detail.split())
    if detail.startswith(f"{item.node}: ") and not rank:
        return detail
    return f"{item.node}{rank}: {detail}".lstrip(": ")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else f"{text[:MAX_DETAIL]} ..."


def _stacks(item: Evidence) -> list[str]:
    """Where a process stood before it was stopped, as far as one screen has room for it."""
    # The agent's own threads say something to its makers only.
    if item.kind != "stacks" or not item.HasField("rank"):
        return []
    lines = [line.rstrip() for line in item.traceback.splitlines() if line.strip()]
    more = [f"    and {len(lines) - MAX_STACK} more lines"] if len(lines) > MAX_STACK else []
    head = f"{item.node} rank {item.rank}: {item.detail}"
    return [head, *(f"  {line[:MAX_DETAIL]}" for line in lines[:MAX_STACK]), *more]


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
