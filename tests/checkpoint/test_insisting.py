"""A step that must get to storage does, once storage takes it, whatever failed before."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from checkpoint.core import names
from checkpoint.stage.rank_folder import WatchedFolder
from checkpoint.storage.storage import Storage
from checkpoint.upload.insisting import Insisting
from tests.checkpoint.helpers import (
    load_alone,
    make_stager,
    make_tensors,
    same_bits,
    uploading,
    wait_for,
)


def blocked(folder: Path) -> str:
    """A store that takes nothing: where its folder should be is a file."""
    root = folder / "store"
    root.write_text("not a folder")
    return f"file://{root}"


def unblock(folder: Path) -> None:
    (folder / "store").unlink()


def test_the_last_step_is_stored_when_the_store_takes_it_again(tmp_path: Path) -> None:
    url, saved = blocked(tmp_path), make_tensors(7)
    stager = make_stager(tmp_path / "memory", saved)
    with uploading(url, tmp_path / "memory", last_step=7) as (uploader, news):
        stager.save(7, {"step": 7}, upload=True, common_step=-1)
        wait_for(lambda: bool(news.trouble), "a failed upload")
        assert news.committed == []
        unblock(tmp_path)
        wait_for(lambda: news.committed == [7], "the commit")
        wait_for(lambda: not uploader.insisting.is_active, "the end of insisting")
        assert uploader.insisting.is_committed
    restored = make_tensors(9)
    assert load_alone(Storage(url), 7, restored) == {"step": 7}
    assert same_bits(restored, saved)


def test_any_other_step_is_given_up_when_its_upload_fails(tmp_path: Path) -> None:
    url = blocked(tmp_path)
    stager = make_stager(tmp_path / "memory", make_tensors(7))
    with uploading(url, tmp_path / "memory", last_step=100) as (uploader, news):
        stager.save(7, {}, upload=True, common_step=-1)
        wait_for(lambda: bool(news.trouble), "a failed upload")
        assert not uploader.insisting.is_active


def test_parts_that_were_deleted_when_another_nodes_failed_are_sent_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    stagers = [
        make_stager(
            tmp_path / f"node-{rank}", make_tensors(7, rank=rank, ranks=2), rank=rank, world_size=2
        )
        for rank in (0, 1)
    ]
    with ExitStack() as nodes:
        at_work = [
            nodes.enter_context(
                uploading(
                    url,
                    tmp_path / f"node-{rank}",
                    local=(rank,),
                    savers=(0, 1),
                    coordinator=rank == 0,
                    last_step=7,
                )
            )
            for rank in (0, 1)
        ]
        stagers[1].save(7, {}, upload=True, common_step=-1)
        storage = Storage(url)
        parts = f"{names.attempt_folder(7, 1)}/{names.PARTS}"
        wait_for(lambda: len(storage.entries(parts)) == 1, "the part of rank 1")
        # As the coordinator does when the part of another node cannot come.
        storage.delete_folder(names.attempt_folder(7, 1))
        stagers[0].save(7, {}, upload=True, common_step=-1)
        wait_for(lambda: at_work[0][1].committed == [7], "the commit")


def test_what_is_newest_in_memory_is_stored_when_somebody_asks_for_it(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    stager = make_stager(tmp_path / "memory", make_tensors(7))
    for step in (5, 6):
        stager.save(step, {}, upload=False, common_step=step - 1)
    with uploading(url, tmp_path / "memory") as (uploader, news):
        uploader.insisting.begin(30.0)
        wait_for(lambda: not uploader.insisting.is_active, "the end of insisting")
        assert (uploader.insisting.step, uploader.insisting.is_committed) == (6, True)
        assert news.committed == [6]


def test_nothing_is_asked_for_for_ever(tmp_path: Path) -> None:
    now_s = [0.0]
    url = blocked(tmp_path)
    make_stager(tmp_path / "rank-00000", make_tensors(7)).close()
    folder = WatchedFolder(tmp_path / "rank-00000" / names.memory_folder(0), 0)
    insisting = Insisting([folder], last_step=None, for_s=0.0, clock=lambda: now_s[0])
    insisting.begin(60.0)
    assert insisting.look(lambda: Storage(url), None) == ""
    # Nothing is sealed there.
    assert (insisting.step, insisting.is_active) == (-1, False)

    stager = make_stager(tmp_path / "rank-00000", make_tensors(7))
    stager.save(3, {}, upload=False, common_step=2)
    insisting.begin(60.0)
    looks = 0
    while insisting.look(lambda: Storage(url), None) or insisting.is_active:
        looks += 1
        now_s[0] += 1.0
        assert now_s[0] < 120.0
    assert not insisting.is_committed
    assert looks > 60
