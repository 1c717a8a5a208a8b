"""Ranks collect garbage after the same steps, and at no other time."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tests.trainer.jobs_numbers import collections
from tests.trainer.ranks import RankPool

SPEC = {
    "name": "a",
    "steps": 7,
    "model": {"layers": 1, "hidden": 8, "heads": 1, "ffn_hidden": 8, "seq_len": 16},
    "parallel": {"dp": 2},
    "eval": {"interval_steps": 3},
    "garbage_interval_steps": 3,
}


def test_all_ranks_collect_after_the_same_steps(ranks: RankPool, tmp_path: Path) -> None:
    for passes, is_on, timed in ranks.run(collections, 2, SPEC, tmp_path / "a"):
        assert is_on
        assert [step for step, _ in timed] == [3, 6]
        assert all(seconds > 0 for _, seconds in timed)
        counts = [(step, len(list(found))) for step, found in groupby(passes)]
        # Before the first step some may come by themselves, and after the last.
        assert [each for each in counts if each[0] in range(1, 7)] == [(3, 1), (6, 1)]
        assert counts[0][0] == 0
