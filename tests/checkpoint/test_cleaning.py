"""What is deleted from a store and what is not, by the store's own clock."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint import catalog
from checkpoint.core.retention import RetentionPolicy
from checkpoint.storage.leases import LEASE_S, Lease, pin, reading, unpin
from checkpoint.storage.storage import Storage
from checkpoint.upload.cleaning import Cleaner
from outlast.chosen import ChosenStart
from tests.checkpoint.helpers import (
    commit_steps,
    load_alone,
    make_stager,
    make_tensors,
    same_bits,
    uploading,
)

GRACE_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store/job-1"


def clean(storage: Storage, *, keep: int = 1, **policy: int) -> list[int]:
    """Clean up; returns what is left, newest first."""
    Cleaner(storage, RetentionPolicy(keep=keep, **policy), grace_s=GRACE_S).clean(waiting=())
    return storage.committed_steps()


def age(path: Path, seconds: float) -> None:
    """Make a file, or all files of a folder, so much older than they are."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        at_s = file.stat().st_mtime - seconds
        os.utime(file, (at_s, at_s))


def test_pinned_checkpoint_stays_until_it_is_unpinned(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1, 2, 3])
    storage = Storage(url)
    pin(storage, 1, "the one that the paper cites")
    assert clean(storage) == [3, 1]
    unpin(storage, 1)
    assert clean(storage) == [3]


def test_checkpoint_that_is_being_read_stays(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1, 2, 3])
    storage = Storage(url)
    with reading(storage, 1):
        assert clean(storage) == [3, 1]
    assert clean(storage) == [3]


def test_lease_of_a_reader_that_died_ends(url: str, tmp_path: Path, root: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1, 2])
    storage = Storage(url)
    lease = Lease(storage, 1)
    lease.renew()
    [file] = (root / "leases").iterdir()
    age(file, LEASE_S - 60)
    assert clean(storage) == [2, 1]
    lease.renew()
    age(file, LEASE_S + 60)
    assert clean(storage) == [2]
    assert not file.exists()


@pytest.mark.parametrize("by_s", [3_600.0, 86_400.0, -3_600.0, -86_400.0])
def test_store_whose_clock_is_set_loses_nothing_that_is_read(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    commit_steps(url, tmp_path / "memory", [1, 2])
    storage = Storage(url)
    cleaner = Cleaner(storage, RetentionPolicy(keep=1), grace_s=GRACE_S)
    with reading(storage, 1):
        # The first look knows the store's clock, the second one that it was set.
        cleaner.clean(waiting=())
        now_s = storage.now_s
        monkeypatch.setattr(storage, "now_s", lambda: now_s() + by_s)
        cleaner.clean(waiting=())
        assert storage.committed_steps() == [2, 1]
    cleaner.clean(waiting=())
    assert storage.committed_steps() == [2]


def test_every_kth_is_kept(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1, 2, 3, 4, 5], keep=9)
    assert clean(Storage(url), every_steps=2) == [5, 4, 2]


def test_best_by_held_out_loss_is_kept(url: str, tmp_path: Path) -> None:
    tensors = make_tensors(0)
    stager = make_stager(tmp_path / "memory", tensors)
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5}
    with uploading(url, tmp_path / "memory", keep=9) as (uploader, _):
        for step, loss in losses.items():
            extra = {"evaluation": {"step": step, "loss": loss}}
            stager.save(step, extra, upload=True, common_step=step - 1)
            assert uploader.drain(20.0)
    storage = Storage(url)
    assert [one.eval_loss for one in catalog.listing(storage)] == [2.5, 2.0, 1.0, 3.0]
    assert clean(storage, best=1) == [4, 2]


def test_damaged_newest_does_not_cost_the_newest_whole_one(
    url: str, tmp_path: Path, root: Path
) -> None:
    commit_steps(url, tmp_path / "memory", [1, 2, 3])
    (root / "step-00000003.1/manifest.json").write_bytes(b"{}")
    assert clean(Storage(url)) == [3, 2]


@pytest.mark.parametrize("step", [1, 3])
def test_remains_go_when_their_writer_must_be_dead(
    url: str, tmp_path: Path, root: Path, step: int
) -> None:
    """Older than the newest checkpoint, and newer: an attempt that got further died."""
    commit_steps(url, tmp_path / "memory", [2])
    storage = Storage(url)
    remains = root / f"step-{step:08d}.7"
    remains.mkdir()
    (remains / "file").write_bytes(b"half")
    clean(storage)
    assert remains.exists()
    age(remains, GRACE_S + 1)
    clean(storage)
    assert not remains.exists()


def test_awaited_folder_is_left_alone(url: str, tmp_path: Path, root: Path) -> None:
    commit_steps(url, tmp_path / "memory", [2])
    remains = root / "step-00000003.7"
    remains.mkdir()
    (remains / "file").write_bytes(b"half")
    age(remains, GRACE_S + 1)
    cleaner = Cleaner(Storage(url), RetentionPolicy(keep=1), grace_s=GRACE_S)
    cleaner.clean(waiting={(3, 7)})
    assert remains.exists()


def test_unfinished_files_of_dead_writers_go(url: str, tmp_path: Path, root: Path) -> None:
    commit_steps(url, tmp_path / "memory", [2])
    storage = Storage(url)
    writer = storage.writer("commits/00000003.json", 10, 10)
    writer.write(0, memoryview(b"half"))
    clean(storage)
    [one] = storage.unfinished()
    assert one.path == "commits/00000003.json"
    [draft] = [path for path in (root / "commits").iterdir() if path.name.startswith(".")]
    age(draft, GRACE_S + 1)
    clean(storage)
    assert storage.unfinished() == []


def test_sweeping_by_hand_deletes_remains_and_no_checkpoint(
    url: str, tmp_path: Path, root: Path
) -> None:
    """A job that died before its first commit, or was forgotten, leaves nobody to clean up."""
    commit_steps(url, tmp_path / "memory", [1, 2, 3])
    remains = root / "step-00000004.7"
    remains.mkdir()
    (remains / "file").write_bytes(b"half")
    age(remains, GRACE_S + 1)
    storage = Storage(url)
    Cleaner(storage, RetentionPolicy(keep=1), grace_s=GRACE_S).sweep()
    assert not remains.exists()
    assert storage.committed_steps() == [3, 2, 1]


def test_clock_of_this_machine_does_not_matter(
    url: str, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_steps(url, tmp_path / "memory", [2])
    storage = Storage(url)
    remains = root / "step-00000001.7"
    remains.mkdir()
    (remains / "file").write_bytes(b"half")
    monkeypatch.setattr("time.time", lambda: 1e12)
    clean(storage)
    assert remains.exists()


def test_cleaning_leaves_no_trace_of_itself(url: str, tmp_path: Path, root: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1, 2])
    clean(Storage(url))
    assert sorted(path.name for path in root.iterdir()) == ["commits", "step-00000002.1"]
    assert [path.name for path in (root / "commits").iterdir()] == ["00000002.json"]


def test_reading_works_where_nothing_can_be_written(
    small_tmpfs: Callable[[int], Path], tmp_path: Path
) -> None:
    folder = small_tmpfs(4 << 20)
    url = f"file://{folder}/job-1"
    commit_steps(url, tmp_path / "memory", [1])
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    storage = Storage(url)
    restored = make_tensors(9)
    with reading(storage, 1) as lease:
        assert load_alone(storage, 1, restored) == {"step": 1}
        lease.renew()
    assert same_bits(restored, make_tensors(1))
    assert not (folder / "job-1/leases").exists()


def test_a_checkpoint_of_a_history_that_is_over_is_set_aside(url: str, tmp_path: Path) -> None:
    """Its upload ended after a person had chosen to begin anew: it counts among no newest."""
    commit_steps(url, tmp_path / "memory", [1, 2, 3])
    storage = Storage(url)
    cleaner = Cleaner(
        storage,
        RetentionPolicy(keep=1),
        grace_s=GRACE_S,
        chosen=(ChosenStart(step=2, attempt=1),),
    )
    # What was chosen is not loaded yet, and a person may have to choose again.
    cleaner.clean(waiting=())
    assert storage.committed_steps() == [3, 2, 1]
    # The next attempt has made a state.
    cleaner.clean(waiting=[(3, 2)])
    assert storage.committed_steps() == [2]
    assert [entry.name for entry in storage.entries("quarantine")] == ["00000003.1.json"]
    assert storage.entries("step-00000003.1"), "its bytes are kept"


def test_a_choice_from_which_nothing_came_gives_up_nothing(url: str, tmp_path: Path) -> None:
    """A person chose again: only the second choice was loaded, and trained from."""
    commit_steps(url, tmp_path / "memory", [1, 2, 3])
    storage = Storage(url)
    again = (ChosenStart(step=3, attempt=2),)
    cleaner = Cleaner(storage, RetentionPolicy(keep=3), grace_s=GRACE_S, chosen=again)
    cleaner.clean(waiting=[(4, 3)])
    assert storage.committed_steps() == [3, 2, 1]
