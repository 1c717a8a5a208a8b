"""Devices of one kind must agree bit for bit, and the minority is named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from diagnostics.core import report
from diagnostics.core.agreement import compare
from diagnostics.core.baseline import Baseline
from diagnostics.core.finding import CheckVerdict, Finding, ThresholdSource
from diagnostics.core.links import yardstick
from diagnostics.core.search import conclude
from tests.diagnostics.build import finding


def votes(*digests: str, key: str = "matmul/cpu") -> list[Finding]:
    return [
        finding(CheckVerdict.PASS, node=f"n{number}", digest=digest, digest_key=key)
        for number, digest in enumerate(digests)
    ]


def named(findings: Sequence[Finding]) -> dict[str, CheckVerdict]:
    return {found.node: found.verdict for found in compare(findings)}


def test_the_minority_is_named() -> None:
    assert named(votes("a", "a", "b", "a", "a")) == {"n2": CheckVerdict.FAIL}
    (found,) = compare(votes("a", "b", "a"))
    assert found.threshold_source is ThresholdSource.PEERS
    assert "differs from that of 2 of 3" in found.detail


@pytest.mark.parametrize("digests", [("a", "b"), ("a", "a", "b", "b"), ("a", "b", "c")])
def test_without_a_majority_nobody_is_convicted(digests: tuple[str, ...]) -> None:
    found = named(votes(*digests))
    assert set(found.values()) == {CheckVerdict.INCONCLUSIVE}
    assert len(found) == len(digests)


def test_other_models_are_other_elections() -> None:
    assert named([*votes("a", "a", "a"), *votes("z", key="matmul/another")]) == {}


def test_agreement_and_checks_without_digest_find_nothing() -> None:
    assert named([*votes("a", "a"), finding(CheckVerdict.PASS)]) == {}


def test_a_report_tells_wrong_bits_from_slowness() -> None:
    found = votes("a", "a", "b", "a")
    found.append(finding(CheckVerdict.FAIL, node="n0"))
    found.append(finding(CheckVerdict.FAIL, node="n1", metric="differing_elements_under_load"))
    nodes = ["n0", "n1", "n2", "n3"]
    made = report.make(
        nodes=nodes,
        findings=[*found, *compare(found)],
        exchanges=[],
        stick=yardstick([], Baseline(runs={})),
        search=conclude(nodes, []),
    )
    assert [node.node for node in made.nodes if node.is_corrupt] == ["n1", "n2"]
    assert [node.node for node in made.nodes if node.verdict.verdict is CheckVerdict.FAIL] == nodes[
        :3
    ]
