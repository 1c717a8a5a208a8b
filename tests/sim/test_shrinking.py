"""A failing run among many is made small, and printed with the line that replays it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from controller.sim.faults import MIN_FAULTS
from controller.sim.run import main, run_seed
from controller.sim.violation import Violation
from tests.sim.bugs import lose_nodes_at_once


def test_a_batch_with_a_failing_seed_prints_the_few_faults_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lose_nodes_at_once(monkeypatch)
    summary = tmp_path / "seeds.json"
    assert main(["--seed", "0", "--count", "2", "--quiet", "--output", str(summary)]) == 1
    failed = json.loads(summary.read_text())["failed"]
    out = capsys.readouterr().out
    lines = re.findall(r"seed (\d+) shrunk: .* --seed (\d+) --only ([\d,]+) --trace", out)
    assert failed
    assert [int(seed) for seed, _, _ in lines] == failed
    for _, seed, only in lines:
        faults = tuple(int(number) for number in only.split(","))
        assert len(faults) < MIN_FAULTS / 2
        with pytest.raises(Violation, match="invariant 2"):
            run_seed(int(seed), only=faults)


def test_a_batch_says_what_it_ran(tmp_path: Path) -> None:
    summary = tmp_path / "seeds.json"
    assert main(["--seed", "3", "--count", "2", "--quiet", "--output", str(summary)]) == 0
    told = json.loads(summary.read_text())
    assert (told["seeds"], told["failed"], told["processes"]) == (2, [], 1)
    assert told["min_nodes"] >= 32
    assert told["min_virtual_hours"] >= 24.0
    assert told["min_faults"] >= MIN_FAULTS
    assert told["seconds"] > 0.0


def test_a_batch_that_takes_too_long_fails_only_when_asked_to() -> None:
    assert main(["--seed", "3", "--count", "2", "--quiet", "--within-s", "0.001"]) == 1
