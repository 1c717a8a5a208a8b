"""`use_session` on ranks of their own, with DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session.ranks import run, seen_by, uploaded

IMPORTS = ("torch", "transformers.trainer", "transformers.training_args")
SCRIPT = Path(__file__).with_name("hugging_face_ddp.py")
# Of 48 samples, 8 a step.
STEPS_OF_EPOCH = 6

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("transformers")


def test_steps_of_as_many_samples_go_on_with_fewer_ranks(tmp_path: Path) -> None:
    every = {"storage_interval_steps": 1}
    folder = f"{tmp_path / 'output'}"
    whole = run(tmp_path / "undisturbed", SCRIPT, [folder], checkpoint=every, imports=IMPORTS)
    assert [done.code for done in whole] == [0, 0], whole[0].log
    expected = {
        step: sorted(sample for done in whole for sample in seen_by(done)[step])
        for step in range(2 * STEPS_OF_EPOCH)
    }
    with uploaded(tmp_path, world_size=2):
        struck = run(tmp_path, SCRIPT, [folder, "5"], checkpoint=every, imports=IMPORTS)
    assert all(done.code for done in struck)

    other = tmp_path / "one"
    other.mkdir()
    (other / "store").symlink_to(tmp_path / "store")
    (alone,) = run(
        other, SCRIPT, [folder], attempt=2, world_size=1, checkpoint=every, imports=IMPORTS
    )
    assert alone.code == 0, alone.log
    assert "from storage" in alone.log
    steps = seen_by(alone)
    assert 0 < min(steps) < STEPS_OF_EPOCH
    assert {step: sorted(seen) for step, seen in steps.items()} == {
        step: expected[step] for step in range(min(steps), 2 * STEPS_OF_EPOCH)
    }
