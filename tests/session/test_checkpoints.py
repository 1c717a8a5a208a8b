"""States of scripts: out of host memory as they were, out of storage on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.storage.storage import Storage
from outlast.blackbox import Phase, Reader
from tests.session.ranks import run, uploaded

SHARDED = Path(__file__).with_name("sharded.py")

pytestmark = pytest.mark.timeout(300)


def test_a_state_comes_back_from_memory_and_from_storage_as_it_was(tmp_path: Path) -> None:
    every = {"storage_interval_steps": 1}
    # With the uploads that its saves ask for, of which the last one may wait for one under way.
    with uploaded(tmp_path, world_size=2):
        first = run(tmp_path, SHARDED, ["4"], checkpoint=every)
    assert [done.code for done in first] == [0, 0], first[0].log
    whole = run(tmp_path / "undisturbed", SHARDED, ["6"], checkpoint=every)

    # The black box has the steps, and the phase that the script names.
    box = Reader(tmp_path / "a1" / "rank-00000.blackbox")
    assert [record.step for record in box.new_steps()] == [1, 2, 3, 4]
    assert box.time_use().phases_s[Phase.DATA] > 0
    box.close()

    # From host memory, in the same layout.
    second = run(tmp_path, SHARDED, ["4"], attempt=2, checkpoint=every)
    for before, after in zip(first, second, strict=True):
        assert "from host memory" in after.log, after.log
        assert after.facts == {**before.facts, "resumed": 4}

    # From storage: with as many ranks, and with more and fewer.
    newest = max(Storage(f"file://{tmp_path}/store").committed_steps())
    reached = run(tmp_path / "shorter", SHARDED, [f"{newest}"], checkpoint=every)
    for attempt, world_size in ((3, 2), (4, 3), (5, 1)):
        other = tmp_path / f"of-{world_size}"
        other.mkdir()
        (other / "store").symlink_to(tmp_path / "store")
        found = run(
            other, SHARDED, [f"{newest}"], attempt=attempt, world_size=world_size, checkpoint=every
        )
        for rank, done in enumerate(found):
            assert "from storage" in done.log, done.log
            assert done.facts == {**reached[rank % 2].facts, "resumed": newest}

    # What follows is what would have followed.
    rest = run(tmp_path, SHARDED, ["6"], attempt=6, checkpoint=every)
    for done, expected in zip(rest, whole, strict=True):
        assert done.facts == {**expected.facts, "resumed": 4}
