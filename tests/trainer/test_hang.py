"""A hang of the program itself, from real black boxes."""

from __future__ import annotations

from pathlib import Path

from diagnostics.core.hang import HangKind, analyse, facts_from_words
from tests.trainer.jobs_hang import PAIR, SQUARE, swapped_groups, swapped_roots
from tests.trainer.ranks import RankPool


def test_groups_in_another_order_are_told_apart_as_the_program_s_mistake(
    ranks: RankPool, tmp_path: Path
) -> None:
    found = ranks.run(swapped_groups, 4, str(tmp_path))
    assert [result["problem"] for result in found] == ["PeerLostError"] * 4
    verdict = analyse(
        [
            facts_from_words(
                rank, result["phase"], result["last_op"], SQUARE, entered=result["entered"]
            )
            for rank, result in enumerate(found)
        ]
    )
    assert verdict.kind is HangKind.ORDER_MISMATCH
    assert verdict.is_users
    assert set(verdict.culprits) == {0, 1, 2, 3}
    assert "operations out of order" in verdict.reason


def test_broadcasts_of_other_roots_are_told_apart_as_the_program_s_mistake(
    ranks: RankPool, tmp_path: Path
) -> None:
    found = ranks.run(swapped_roots, 2, str(tmp_path))
    assert [result["problem"] for result in found] == ["PeerLostError"] * 2
    verdict = analyse(
        [
            facts_from_words(
                rank, result["phase"], result["last_op"], PAIR, entered=result["entered"]
            )
            for rank, result in enumerate(found)
        ]
    )
    assert verdict.kind is HangKind.OPERATION_MISMATCH
    assert verdict.is_users
    assert "rank 0 is in dp broadcast #2 from 1 while rank 1 is in dp broadcast #2 from 0" in (
        verdict.reason
    )
