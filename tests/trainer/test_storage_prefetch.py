"""What a start looks at in storage while groups and model are made."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkpoint.core.names import COMMITS, attempt_folder
from checkpoint.errors import CorruptCheckpointError
from checkpoint.restore.storage_prefetch import StoragePrefetch
from checkpoint.storage.storage import Storage
from tests.checkpoint.helpers import commit_steps


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with checkpoints of two steps."""
    commit_steps(str(tmp_path / "store"), tmp_path / "memory", [2, 4])
    return tmp_path / "store"


def test_the_newest_manifest_is_read_before_it_is_asked_for(store: Path) -> None:
    prefetch = StoragePrefetch(str(store), lists=True)
    prefetch.begin()
    look = prefetch.take()
    assert isinstance(look.storage, Storage)
    assert look.steps == [4, 2]
    shutil.rmtree(store / COMMITS)
    assert look.manifest(4).step == 4
    with pytest.raises(CorruptCheckpointError, match=r"commits/00000002\.json"):
        look.manifest(2)
    look.storage.close()


def test_a_damaged_manifest_is_told_of_when_its_step_is_loaded(store: Path) -> None:
    (store / attempt_folder(4, 1) / "manifest.json").write_text("{}")
    look = StoragePrefetch(str(store), lists=True).take()
    assert isinstance(look.storage, Storage)
    with pytest.raises(CorruptCheckpointError, match="manifest"):
        look.manifest(4)
    assert look.manifest(2).step == 2
    look.storage.close()


def test_only_who_lists_asks_what_is_there(store: Path) -> None:
    look = StoragePrefetch(str(store), lists=False).take()
    assert (look.steps, look.newest) == ([], None)
    assert isinstance(look.storage, Storage)
    look.storage.close()
