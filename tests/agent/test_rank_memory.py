"""Host memory of ranks that a node had in an earlier layout."""

from __future__ import annotations

from pathlib import Path

from controller.agent.memory.rank_memory import free_copies, hand_over, stray_folders


def make(memory_dir: Path, *names: str) -> None:
    for name in names:
        (memory_dir / name).mkdir(parents=True)
        (memory_dir / name / "slot-0").write_text(name)


def held(memory_dir: Path) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in memory_dir.glob("rank-*/slot-0")}


def test_ranks_that_stay_keep_theirs_and_the_rest_is_freed(tmp_path: Path) -> None:
    make(tmp_path, "rank-00000", "rank-00001", "replicas/rank-00002")
    assert stray_folders(tmp_path, (0, 1)) == []
    hand_over(tmp_path, (0,))
    assert held(tmp_path) == {"rank-00000": "rank-00000"}
    assert (tmp_path / "replicas").exists()
    free_copies(tmp_path)
    assert not (tmp_path / "replicas").exists()


def test_rank_that_has_nothing_gets_what_another_left(tmp_path: Path) -> None:
    make(tmp_path, "rank-00002", "rank-00003")
    hand_over(tmp_path, (0, 1))
    assert held(tmp_path) == {"rank-00000": "rank-00002", "rank-00001": "rank-00003"}
    hand_over(tmp_path / "nowhere", (0,))
