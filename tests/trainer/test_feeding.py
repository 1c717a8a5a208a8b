"""Micro-batches of tokens: the same whatever the layout, and across a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outlast.errors import SettingError
from outlast.spec.parse import parse_spec
from tests.tokens.corpora import counted, prepared, write
from tests.trainer.places import place_of
from trainer.worker.feeding import Feeding, open_data

SEQ_LEN = 8


def opened(tmp_path: Path, data: dict[str, Any], *, dp: int = 1, replica: int = 0) -> Feeding:
    document = {
        "name": "a",
        "model": {"seq_len": SEQ_LEN, "vocab_size": 256},
        "data": {"global_batch": 4, "validation_fraction": 0.1, **data},
        "parallel": {"dp": dp},
    }
    mesh = place_of(replica)
    return open_data(parse_spec(document), mesh, tmp_path / "unused")


def rows(feeding: Feeding, step: int) -> list[list[int]]:
    """Sequences of a step with the token behind each."""
    return [
        [*tokens.tolist(), int(targets[-1])]
        for batch in feeding.train.micro_batches(step)
        for tokens, targets in zip(batch.tokens.t(), batch.targets.t(), strict=True)
    ]


@pytest.fixture
def blend(tmp_path: Path) -> dict[str, Any]:
    low = write(tmp_path / "low", [counted(500, vocab_size=100), counted(301, vocab_size=100)])
    splits = {
        "train": [[100 + each for each in counted(400, vocab_size=100)]],
        "validation": [[200] * 60],
    }
    high = prepared(tmp_path / "high", splits)
    change = {"from_step": 6, "tokens": {str(high): 1}}
    return {"tokens": {str(low): 3, str(high): 1}, "blend_changes": [change]}


def test_every_layout_and_restart_sees_the_same_batches(
    tmp_path: Path, blend: dict[str, Any]
) -> None:
    whole = opened(tmp_path, blend)
    through = {step: rows(whole, step) for step in range(1, 10)}
    for dp in (2, 4):
        parts = [opened(tmp_path, blend, dp=dp, replica=replica) for replica in range(dp)]
        for step in (9, 1, 6):
            assert [row for part in parts for row in rows(part, step)] == through[step]
    assert parts[0].digest == whole.digest


def test_weights_hold_and_change_at_their_step(tmp_path: Path, blend: dict[str, Any]) -> None:
    feeding = opened(tmp_path, blend)
    for step in range(1, 6):
        assert sum(row[0] < 100 for row in rows(feeding, step)) == 3
    assert all(row[0] >= 100 for step in range(6, 9) for row in rows(feeding, step))
    assert feeding.blend is not None
    # High, then low: sources are in the order of their paths.
    assert feeding.blend.before(4 * 7) == [13, 15]


def test_sequences_are_cut_out_of_the_row_of_documents(
    tmp_path: Path, blend: dict[str, Any]
) -> None:
    tokens = [*counted(500, vocab_size=100), *counted(301, vocab_size=100)]
    cuts = [tokens[at : at + SEQ_LEN + 1] for at in range(0, 793, SEQ_LEN)]
    seen = [row for step in range(1, 6) for row in rows(opened(tmp_path, blend), step)]
    assert all(row in cuts for row in seen if row[0] < 100)


def test_held_out_sequences_are_never_trained_on(tmp_path: Path) -> None:
    ids = torch.randint(0, 256, (1000,), generator=torch.Generator().manual_seed(1)).tolist()
    feeding = opened(tmp_path, {"tokens": str(write(tmp_path / "alone", [ids]))})
    trained = {tuple(row) for step in range(1, 40) for row in rows(feeding, step)}
    held = {
        tuple(tokens.tolist())
        for step in range(1, 9)
        for batch in feeding.evaluations[""].micro_batches(step)
        for tokens in batch.tokens.t()
    }
    assert len(trained) == 112
    assert len(held) == 12
    assert not held & {row[:-1] for row in trained}


def test_ids_that_the_look_before_the_start_has_not_seen_end_the_step(tmp_path: Path) -> None:
    name = write(tmp_path / "large", [[*counted(100), 300, *counted(100)]])
    feeding = opened(tmp_path, {"tokens": str(name)})
    steps = map(rows, [feeding] * 9, range(1, 10))
    said = r"data: /.*/large\.bin has the id 300 as token 100 .*, beyond model\.vocab_size = 256"
    with pytest.raises(SettingError, match=said):
        list(steps)
