"""A hang of the program itself, from real black boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diagnostics.core.hang import HangKind, HangVerdict, analyse
from outlast.layout import Layout
from tests.diagnostics.spoken import facts_from_words
from tests.trainer.jobs_hang import PAIR, SQUARE, swapped_groups, swapped_roots
from tests.trainer.ranks import RankPool


def verdict_of(found: Sequence[Mapping[str, Any]], layout: Layout) -> HangVerdict:
    """Why these ranks stood still, each of which gave its peers up in the end."""
    assert [result["problem"] for result in found] == ["PeerLostError"] * layout.world_size
    return analyse(
        [
            facts_from_words(
                rank, result["phase"], result["last_op"], layout, entered=result["entered"]
            )
            for rank, result in enumerate(found)
        ]
    )


def test_groups_in_another_order_are_told_apart_as_the_program_s_mistake(
    ranks: RankPool, tmp_path: Path
) -> None:
    verdict = verdict_of(ranks.run(swapped_groups, 4, str(tmp_path)), SQUARE)
    assert verdict.kind is HangKind.ORDER_MISMATCH
    assert verdict.is_program_error
    assert set(verdict.culprits) == {0, 1, 2, 3}
    assert "operations out of order" in verdict.reason


def test_broadcasts_of_other_roots_are_told_apart_as_the_program_s_mistake(
    ranks: RankPool, tmp_path: Path
) -> None:
    verdict = verdict_of(ranks.run(swapped_roots, 2, str(tmp_path)), PAIR)
    assert verdict.kind is HangKind.OPERATION_MISMATCH
    assert verdict.is_program_error
    assert "rank 0 is in dp broadcast #2 from 1 while rank 1 is in dp broadcast #2 from 0" in (
        verdict.reason
    )
