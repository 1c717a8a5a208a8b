"""`SessionCallback` on ranks of their own, with DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session.ranks import run, seen_by, uploaded

IMPORTS = ("torch", "lightning")
SCRIPT = Path(__file__).with_name("lightning_ddp.py")
# Of 48 samples, in batches of 4 on two ranks.
STEPS_OF_EPOCH = 6

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("lightning")


def test_ranks_go_on_together_and_fewer_of_them_where_they_were(tmp_path: Path) -> None:
    every = {"storage_interval_steps": 1}
    whole = run(tmp_path / "undisturbed", SCRIPT, checkpoint=every, imports=IMPORTS)
    assert [done.code for done in whole] == [0, 0], whole[0].log

    with uploaded(tmp_path, world_size=2):
        struck = run(
            tmp_path, SCRIPT, ["validation", f"{STEPS_OF_EPOCH}"], checkpoint=every, imports=IMPORTS
        )
    assert all(done.code for done in struck)
    second = run(tmp_path, SCRIPT, ["training", "8"], attempt=2, checkpoint=every, imports=IMPORTS)
    # The step before the validation, and what follows it.
    for done, expected in zip(second, whole, strict=True):
        assert "goes on after step 5, from host memory" in done.log
        assert seen_by(done) == {step: seen_by(expected)[step] for step in (5, 6, 7)}

    # The same epoch on one rank: what is left of it, in the order in which two ranks would.
    other = tmp_path / "one"
    other.mkdir()
    (other / "store").symlink_to(tmp_path / "store")
    (alone,) = run(other, SCRIPT, attempt=3, world_size=1, checkpoint=every, imports=IMPORTS)
    assert alone.code == 0, alone.log
    assert "goes on after step" in alone.log
    assert "from storage" in alone.log
    steps = seen_by(alone)
    resumed = min(steps)
    assert 0 < resumed < STEPS_OF_EPOCH
    left = [
        sorted(value for done in whole for value in seen_by(done)[step][:-1])
        for step in range(resumed, 2 * STEPS_OF_EPOCH)
    ]
    pairs = zip(list(steps.values())[::2], list(steps.values())[1::2], strict=True)
    assert [sorted([*first[:-1], *second[:-1]]) for first, second in pairs] == left
