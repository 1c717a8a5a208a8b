"""Checkpoints on a real HDFS, through WebHDFS and through hdfs-native."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint import catalog
from checkpoint.errors import StorageUnavailableError
from checkpoint.storage.storage import Storage
from tests.checkpoint.helpers import (
    assert_one_of_many_creates,
    commit_steps,
    load_alone,
    make_stager,
    make_tensors,
    same_bits,
    uploading,
    wait_for,
)
from tests.stores.hadoop import Hadoop

LONG_S = 120.0


def test_probe_passes_and_leaves_nothing(hdfs_url: str) -> None:
    Storage(hdfs_url).probe()
    assert Storage(hdfs_url).entries("") == []


def test_of_many_writers_exactly_one_creates_a_record(hdfs_url: str) -> None:
    storage = Storage(hdfs_url)
    assert_one_of_many_creates(storage)
    # Nothing is left of the losers.
    assert [entry.name for entry in storage.entries("commits")] == ["00000001.json"]


def test_record_that_exists_is_never_replaced(hdfs_url: str) -> None:
    """fsspec's own `mv` for WebHDFS says nothing when HDFS refuses."""
    storage = Storage(hdfs_url)
    assert storage.put_if_absent("commits/00000001.json", b"first")
    assert not storage.put_if_absent("commits/00000001.json", b"second")
    assert storage.read_bytes("commits/00000001.json") == b"first"


def test_checkpoints_come_back_bitwise_and_old_ones_go(hdfs_url: str, tmp_path: Path) -> None:
    commit_steps(hdfs_url, tmp_path, [1, 2, 3], keep=2)
    storage = Storage(hdfs_url)
    assert storage.committed_steps() == [3, 2]
    folders = [entry.name for entry in storage.entries("") if entry.name.startswith("step-")]
    assert sorted(folders) == ["step-00000002.1", "step-00000003.1"]
    assert catalog.verify(storage, 3, lambda num_bytes: None) == []
    restored = make_tensors(9)
    assert load_alone(storage, 3, restored) == {"step": 3}
    assert same_bits(restored, make_tensors(3))


def test_times_are_of_the_store(hdfs_url: str, tmp_path: Path) -> None:
    """What tells dead uploads from living ones."""
    storage = Storage(hdfs_url)
    before_s = storage.now_s()
    commit_steps(hdfs_url, tmp_path, [1])
    [listed] = catalog.listing(storage)
    assert listed.written_at_s is not None
    assert before_s <= listed.written_at_s <= storage.now_s()


def test_safe_mode_is_reported_in_words_and_the_next_upload_succeeds(
    hdfs_url: str, tmp_path: Path, hadoop: Hadoop
) -> None:
    stager = make_stager(tmp_path, make_tensors(0))
    with uploading(hdfs_url, tmp_path, timeout_s=5.0) as (uploader, news):
        assert uploader.drain(LONG_S)
        hadoop.enter_safe_mode()
        try:
            stager.save(1, {}, upload=True, common_step=-1)
            wait_for(lambda: bool(news.trouble), "trouble", timeout_s=LONG_S)
        finally:
            hadoop.leave_safe_mode()
        assert news.trouble[0][:2] == (1, "upload")
        assert "safe mode" in news.trouble[0][2].lower()
        stager.save(2, {}, upload=True, common_step=1)
        wait_for(lambda: news.committed == [2], "the next upload", timeout_s=LONG_S)


def test_data_node_that_hangs_fails_a_write_at_its_deadline(hdfs_url: str, hadoop: Hadoop) -> None:
    storage = Storage(hdfs_url, deadline_s=3.0)
    storage.probe()
    hadoop.freeze_data_node()
    try:
        with pytest.raises(StorageUnavailableError):
            storage.write_bytes("file", b"x" * (1 << 20))
    finally:
        hadoop.thaw_data_node()
    wait_for(lambda: can_write(storage), "a write afterwards", timeout_s=LONG_S)


def can_write(storage: Storage) -> bool:
    try:
        storage.write_bytes("file", b"afterwards")
    except StorageUnavailableError:
        return False
    return storage.read_bytes("file") == b"afterwards"
