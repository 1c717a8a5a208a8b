"""Listing, verifying, copying and removing checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint import catalog
from checkpoint.errors import CorruptCheckpointError
from checkpoint.storage.leases import pin, pinned_steps, reading
from checkpoint.storage.root_owner import Owner, claim
from checkpoint.storage.storage import Storage
from tests.checkpoint.conftest import both_stores
from tests.checkpoint.helpers import commit_steps, load_alone, make_tensors, same_bits


def ignore(num_bytes: int) -> None:
    pass


@both_stores
def test_listing_says_what_exists_and_what_keeps_it(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path, [1, 2, 3])
    storage = Storage(url)
    pin(storage, 1, "")
    with reading(storage, 2):
        found = catalog.listing(storage)
    assert [(one.step, one.is_pinned, one.is_read) for one in found] == [
        (3, False, False),
        (2, False, True),
        (1, True, False),
    ]
    assert {one.attempt for one in found} == {1}
    assert all(one.size_bytes and one.num_parts == 1 and one.written_at_s for one in found)
    assert [one.problem for one in found] == ["", "", ""]


def test_whole_checkpoint_verifies_and_every_byte_is_counted(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1])
    storage = Storage(url)
    counted: list[int] = []
    assert catalog.verify(storage, 1, counted.append) == []
    assert sum(counted) == storage.read_commit(1)[0].size_bytes
    assert storage.entries("leases") == []


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_damage_to_any_file_is_found(
    url: str, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    commit_steps(url, tmp_path / "memory", [1])
    root = tmp_path / "store/job-1"
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    assert len(files) >= 4
    for path in files:
        kept = tmp_path / "kept"
        shutil.copy2(path, kept)
        damage(path)
        assert catalog.verify(Storage(url), 1, ignore), f"{damage.__name__} {path.name}"
        shutil.move(kept, path)
    assert catalog.verify(Storage(url), 1, ignore) == []


@pytest.mark.parametrize("damage", [flip, truncate])
def test_damage_to_the_owners_record_is_found(
    url: str, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    commit_steps(url, tmp_path / "memory", [1])
    claim(Storage(url), Owner(job_id="job-1", mark="its mark"))
    assert catalog.verify(Storage(url), 1, ignore) == []
    damage(tmp_path / "store/job-1/owner.json")
    (problem,) = catalog.verify(Storage(url), 1, ignore)
    assert problem.startswith("owner.json: ")


def test_listing_names_what_is_damaged(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1, 2])
    flip(tmp_path / "store/job-1/step-00000002.1/manifest.json")
    damaged, whole = catalog.listing(Storage(url))
    assert "manifest.json" in damaged.problem
    assert damaged.size_bytes is None
    assert not whole.problem


@both_stores
def test_copy_exists_there_and_loads_bitwise(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1, 2])
    target = Storage(f"file://{tmp_path}/elsewhere/job-1")
    copied: list[int] = []
    catalog.copy(Storage(url), 2, target, copied.append)
    assert target.committed_steps() == [2]
    assert sum(copied) == target.read_commit(2)[0].size_bytes
    assert catalog.verify(target, 2, ignore) == []
    restored = make_tensors(9)
    load_alone(target, 2, restored)
    assert same_bits(restored, make_tensors(2))
    # Once more is no trouble.
    catalog.copy(Storage(url), 2, target, copied.append)


def test_damaged_checkpoint_is_never_copied(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1])
    [part] = Storage(url).read_commit(1)[1].parts
    payload = tmp_path / "store/job-1/step-00000001.1" / part.file
    flip(payload)
    target = Storage(f"file://{tmp_path}/elsewhere/job-1")
    with pytest.raises(CorruptCheckpointError, match="do not fit their checksum"):
        catalog.copy(Storage(url), 1, target, ignore)
    assert target.committed_steps() == []
    assert target.unfinished() == []


def test_copy_never_replaces_another_checkpoint(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1])
    other = f"file://{tmp_path}/elsewhere/job-1"
    commit_steps(other, tmp_path / "memory-2", [1])
    record = tmp_path / "elsewhere/job-1/commits/00000001.json"
    record.write_bytes(json.dumps({"other": True}).encode())
    with pytest.raises(catalog.RefusedError, match="another checkpoint of step 1"):
        catalog.copy(Storage(url), 1, Storage(other), ignore)
    assert json.loads(record.read_bytes()) == {"other": True}


def test_what_is_needed_is_removed_by_force_only(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [1, 2, 3, 4])
    storage = Storage(url)
    pin(storage, 1, "")
    for step, reason in ((4, "newest"), (1, "pinned")):
        with pytest.raises(catalog.RefusedError, match=reason):
            catalog.remove(storage, [3, step], force=False)
    with reading(storage, 2), pytest.raises(catalog.RefusedError, match="reading"):
        catalog.remove(storage, [2], force=False)
    with pytest.raises(catalog.RefusedError, match="no checkpoint of step 9"):
        catalog.remove(storage, [3, 9], force=True)
    assert storage.committed_steps() == [4, 3, 2, 1]
    catalog.remove(storage, [3], force=False)
    catalog.remove(storage, [4, 1], force=True)
    assert storage.committed_steps() == [2]
    assert pinned_steps(storage) == set()
