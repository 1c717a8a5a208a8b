"""Results that are committed hold what is promised, and are of what there is now."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.matrix import full

ROOT = Path(__file__).parents[2]
_HOLDS = {">=": operator.ge, "<=": operator.le}


def read(path: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / path).read_text())
    return document


@pytest.mark.parametrize(
    ("name", "nodes", "least"),
    [("1536", 1_536, 0.97), ("12500", 12_500, 0.80), ("day-12500", 12_500, 0.80)],
)
def test_a_large_job_under_the_mix_of_llama_3_trains_for_most_of_its_time(
    name: str, nodes: int, least: float
) -> None:
    found = read(f"tests/sim/results/llama3-{name}-nodes.json")
    assert found["scenario"]["nodes"] == nodes
    assert found["ettr"] >= least
    assert found["violations"] == []
    assert found["by_person"] < 0.01 * found["incidents"]


def test_a_thousand_seeds_take_minutes_and_break_no_invariant() -> None:
    found = read("tests/sim/results/seeds.json")
    assert found["seeds"] >= 1_000
    assert found["failed"] == []
    assert found["seconds"] <= 300.0
    assert found["min_nodes"] >= 32
    assert found["min_virtual_hours"] >= 24.0
    assert found["min_faults"] >= 20


def test_every_row_of_the_matrix_has_passed() -> None:
    rows = read("tests/chaos/results/full.json")["rows"]
    assert {row["row"] for row in rows} == {row.name for row in full()}
    assert [row["row"] for row in rows if not row["passed"]] == []


def test_a_healthy_hour_was_taken_for_nothing_else() -> None:
    hours = read("tests/chaos/results/full.json")["healthy"]
    assert any(hour["seconds"] >= 3600 and not hour["false_positives"] for hour in hours)


def test_a_restart_is_as_fast_as_is_claimed() -> None:
    claims = read("bench/results/recovery.json")["claims"]
    goals = {claim["claim"]: claim for claim in claims if claim["goal"] != "reported"}
    assert "kill_torchrun_vs_ours" in goals
    for claim in goals.values():
        comparison, _, limit = claim["goal"].partition(" ")
        assert _HOLDS[comparison](claim["value"], float(limit)), claim
