"""Every table of texts knows its samples and leaves its counter samples alone."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

import pytest

from diagnostics.core import rules
from diagnostics.core.rules.table import Rule, Table

TABLES: list[Table[Any]] = [
    value
    for module in pkgutil.iter_modules(rules.__path__)
    for value in vars(import_module(f"{rules.__name__}.{module.name}")).values()
    if isinstance(value, Table)
]
SAMPLES = [
    pytest.param(table, rule, text, id=f"{table.name}-{rule.name}-{number}")
    for table in TABLES
    for rule in table.rules
    for number, text in enumerate(rule.matches)
]
COUNTER_SAMPLES = [
    pytest.param(rule, text, id=f"{table.name}-{rule.name}-{number}")
    for table in TABLES
    for rule in table.rules
    for number, text in enumerate(rule.misses)
]


def test_the_tables_are_these() -> None:
    assert sorted(table.name for table in TABLES) == [
        "device errors",
        "exits",
        "kernel log",
        "worker log",
    ]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_rule_has_a_name_of_its_own_and_samples_of_both_kinds(table: Table[Any]) -> None:
    assert len({rule.name for rule in table.rules}) == len(table.rules)
    assert [rule.name for rule in table.rules if not (rule.matches and rule.misses)] == []


@pytest.mark.parametrize(("table", "rule", "text"), SAMPLES)
def test_a_sample_is_known_to_its_rule_first(table: Table[Any], rule: Rule[Any], text: str) -> None:
    assert table.first(text) is rule


@pytest.mark.parametrize(("rule", "text"), COUNTER_SAMPLES)
def test_a_rule_leaves_its_counter_samples_alone(rule: Rule[Any], text: str) -> None:
    assert not rule.pattern.search(text)
