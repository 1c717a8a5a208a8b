"""The file of results: it goes on where an interrupted run stopped."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chaos.record import Results


def test_a_later_run_leaves_out_what_has_passed_and_repeats_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "results" / "full.json"
    first = Results(path)
    first.add("one", (), None)
    first.add("other", ("wrong node",), None)

    later = Results(path)
    assert later.has_passed("one")
    assert not later.has_passed("other")
    assert not later.has_passed("never run")
    later.add("other", (), None)
    later.add_healthy(300.0, 2700, [])
    document = json.loads(path.read_text())
    assert (document["passed"], document["failed"]) == (2, 0)
    assert [row["row"] for row in document["rows"]] == ["one", "other"]
    assert document["healthy"][0]["seconds"] == 300.0


def test_healthy_training_has_to_last_as_long_and_without_a_finding(tmp_path: Path) -> None:
    results = Results(tmp_path / "full.json")
    results.add_healthy(300.0, 2700, [])
    results.add_healthy(3700.0, 30000, ["slowdown: steps became slower"])
    assert results.has_been_healthy(300.0)
    assert not results.has_been_healthy(301.0)
    results.add_healthy(3601.0, 30000, [])
    assert results.has_been_healthy(3600.0)


def test_nothing_is_kept_without_a_path() -> None:
    results = Results(None)
    results.add("one", (), None)
    assert results.has_passed("one")
