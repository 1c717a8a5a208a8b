"""Lines of running workers, and what is reported of them."""

from __future__ import annotations

import pytest

from diagnostics.core.rules.worker_log import WORKER_LOG, WorkerRule
from diagnostics.core.worker_log import known_lines


@pytest.mark.parametrize("rule", WORKER_LOG.rules, ids=lambda rule: rule.name)
def test_lines_that_a_rule_leaves_alone_are_known_to_no_other(rule: WorkerRule) -> None:
    for line in rule.matches:
        assert [match.rule.name for match in known_lines([line])] == [rule.name], line
    for line in rule.misses:
        assert not known_lines([line]), line


def test_a_storm_of_one_kind_of_line_is_told_once_with_its_first() -> None:
    lines = [f"OSError: [Errno 5] Input/output error: {number}" for number in range(1000)]
    (match,) = known_lines(["step 1", *lines])
    assert match.message.endswith("Input/output error: 0")
    assert "rule 'mount' of table" in match.message


def test_a_line_without_an_end_does_not_fill_the_incident() -> None:
    (match,) = known_lines(["GPU is lost " + "x" * 100_000])
    assert len(match.message) < 500
