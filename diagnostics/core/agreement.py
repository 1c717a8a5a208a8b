"""Devices that compute the same thing must agree bit for bit; the minority is wrong.

A device that is wrong in the same way each time agrees with itself, so only
others can convict it. Results are compared by digest, and only between devices
whose model and libraries are the same (`digest_key`): kernels for another model
may round differently and both be right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from diagnostics.core.finding import CheckVerdict, Finding, ThresholdSource

# Of two that differ nobody can say which one is wrong.
MIN_VOTERS = 3
METRIC = "result_differs_from_peers"


def compare(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """One finding per device that disagrees with others of its kind; none where all agree.

    `findings` are those of all nodes of a run; each that carries a digest is one vote.
    """
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.digest:
            groups.setdefault(finding.digest_key, []).append(finding)
    return tuple(found for group in groups.values() for found in _compare_group(group))


def _compare_group(votes: list[Finding]) -> list[Finding]:
    counts = Counter(vote.digest for vote in votes)
    if len(counts) == 1:
        return []
    (winner, most), *_ = counts.most_common()
    settled = len(votes) >= MIN_VOTERS and 2 * most > len(votes)
    if not settled:
        reason = f"{len(votes)} devices of one kind gave {len(counts)} results and no majority: "
        reason += "one of them is wrong, and it takes three or more to say which"
        return [_disagrees(vote, CheckVerdict.INCONCLUSIVE, reason) for vote in votes]
    reason = f"its result differs from that of {most} of {len(votes)} devices of its kind"
    return [_disagrees(vote, CheckVerdict.FAIL, reason) for vote in votes if vote.digest != winner]


def _disagrees(vote: Finding, verdict: CheckVerdict, reason: str) -> Finding:
    return replace(
        vote,
        metric=METRIC,
        value=1.0,
        unit="",
        threshold=0.0,
        threshold_source=ThresholdSource.PEERS,
        verdict=verdict,
        detail=f"{reason}; {vote.detail}",
        duration_s=0.0,
    )
