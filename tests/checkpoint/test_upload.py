from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from checkpoint import catalog
from checkpoint.core.names import memory_folder
from checkpoint.core.slots import UploadState
from checkpoint.stage import slotfile
from checkpoint.stage.payload import NamedTensor
from checkpoint.stage.slotfile import Seal
from checkpoint.storage.storage import Storage
from checkpoint.upload.commit import Committed, Coordinator, Trouble
from tests.checkpoint.conftest import both_stores
from tests.checkpoint.helpers import (
    DEADLINE_S,
    commit_rules,
    commit_steps,
    load_alone,
    make_stager,
    make_tensors,
    same_bits,
    uploading,
    wait_for,
)
from tests.checkpoint.test_storage import StuckFileSystem, stuck_url

__all__ = ["stuck_url"]  # the fixture is found by its name in this module


def make_coordinator(storage: Storage, savers: Sequence[int], *, timeout_s: float) -> Coordinator:
    return Coordinator(storage, savers, commit_rules(timeout_s=timeout_s))


def upload_states(memory: Path, rank: int = 0) -> dict[int, UploadState]:
    slots = [slot.read() for slot in slotfile.open_existing(memory / memory_folder(rank))]
    return {slot.step: slot.upload for slot in slots if slot.sealed}


@both_stores
def test_wanted_step_is_committed_and_comes_back_bitwise(url: str, tmp_path: Path) -> None:
    saved = make_tensors(5)
    stager = make_stager(tmp_path, saved)
    with uploading(url, tmp_path) as (uploader, news):
        stager.save(4, {"step": 4}, upload=False, common_step=-1)
        stager.save(5, {"step": 5, "text": "ä"}, upload=True, common_step=4)
        assert uploader.drain(DEADLINE_S)
    assert news.committed == [5]
    assert news.trouble == []
    assert upload_states(tmp_path) == {4: UploadState.NONE, 5: UploadState.DONE}

    storage = Storage(url)
    assert storage.committed_steps() == [5]
    commit, manifest = storage.read_commit(5)
    assert news.sizes == [commit.size_bytes] == [manifest.size_bytes]
    restored = make_tensors(6)
    assert load_alone(storage, 5, restored) == {"step": 5, "text": "ä"}
    assert same_bits(restored, saved)


def test_nodes_that_share_only_the_store_make_one_checkpoint(url: str, tmp_path: Path) -> None:
    with ExitStack() as nodes:
        stagers = [
            make_stager(
                tmp_path / f"node-{rank}",
                make_tensors(3, rank=rank, ranks=3),
                rank=rank,
                world_size=3,
            )
            for rank in range(3)
        ]
        at_work = [
            nodes.enter_context(
                uploading(
                    url,
                    tmp_path / f"node-{rank}",
                    local=(rank,),
                    savers=(0, 1, 2),
                    coordinator=rank == 0,
                )
            )
            for rank in range(3)
        ]
        for rank in (2, 0):
            stagers[rank].save(3, {}, upload=True, common_step=-1)
            wait_for(
                lambda rank=rank: (
                    upload_states(tmp_path / f"node-{rank}", rank) == {3: UploadState.DONE}
                ),
                f"upload of rank {rank}",
            )
        assert Storage(url).committed_steps() == []
        stagers[1].save(3, {}, upload=True, common_step=-1)
        assert at_work[0][0].drain(DEADLINE_S)
        assert [news.committed for _, news in at_work] == [[3], [], []]
        assert [news.trouble for _, news in at_work] == [[], [], []]
    for rank in range(3):
        restored = make_tensors(9, rank=rank, ranks=3)
        load_alone(Storage(url), 3, restored)
        assert same_bits(restored, make_tensors(3, rank=rank, ranks=3))


@both_stores
def test_a_rank_that_owns_nothing_has_an_empty_part(url: str, tmp_path: Path) -> None:
    others = [named._replace(owned=False) for named in make_tensors(3)]
    stagers = [
        make_stager(tmp_path, tensors, rank=rank, world_size=2)
        for rank, tensors in enumerate((make_tensors(3), others))
    ]
    with uploading(url, tmp_path, local=(0, 1), savers=(0, 1)) as (uploader, news):
        for stager in stagers:
            stager.save(3, {}, upload=True, common_step=-1)
        assert uploader.drain(DEADLINE_S)
    assert (news.committed, news.trouble) == ([3], [])
    _, manifest = Storage(url).read_commit(3)
    assert [part.nbytes > 0 for part in manifest.parts] == [True, False]
    restored = make_tensors(9)
    load_alone(Storage(url), 3, restored)
    assert same_bits(restored, make_tensors(3))


def test_ranks_that_both_own_a_tensor_make_no_checkpoint(url: str, tmp_path: Path) -> None:
    stagers = [make_stager(tmp_path, make_tensors(3), rank=rank, world_size=2) for rank in (0, 1)]
    with uploading(url, tmp_path, local=(0, 1), savers=(0, 1)) as (uploader, news):
        for stager in stagers:
            stager.save(3, {}, upload=True, common_step=-1)
        assert uploader.drain(DEADLINE_S)
    [(step, stage, detail)] = news.trouble
    assert (step, stage) == (3, "commit")
    assert "tensor model.weight at (0, 0) has two owners" in detail
    assert Storage(url).committed_steps() == []


def test_upload_of_a_worker_that_died_is_finished(url: str, tmp_path: Path) -> None:
    # A real death: no destructor of the stager runs.
    program = (
        "import os, pathlib, sys; from tests.checkpoint.helpers import make_stager, make_tensors;"
        "stager = make_stager(pathlib.Path(sys.argv[1]), make_tensors(5));"
        "stager.save(5, {}, upload=True, common_step=-1); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    with uploading(url, tmp_path) as (uploader, news):
        assert uploader.drain(DEADLINE_S)
    assert news.committed == [5]
    restored = make_tensors(6)
    load_alone(Storage(url), 5, restored)
    assert same_bits(restored, make_tensors(5))


def test_upload_left_half_done_by_a_dead_agent_is_done_again(url: str, tmp_path: Path) -> None:
    stager = make_stager(tmp_path, make_tensors(5))
    stager.save(5, {}, upload=True, common_step=-1)
    slotfile.open_existing(tmp_path / memory_folder(0))[0].set_upload(UploadState.BUSY)
    with uploading(url, tmp_path) as (uploader, news):
        assert uploader.drain(DEADLINE_S)
    assert news.committed == [5]


def test_upload_whose_record_is_stored_is_not_sent_again(url: str, tmp_path: Path) -> None:
    """An agent died between the last byte and its note of that."""
    upload_part(url, tmp_path, 1)
    payload = tmp_path / "store/job-1/step-00000005.1/__0_0.distcp"
    sent = payload.stat()
    [slot] = [
        slot for slot in slotfile.open_existing(tmp_path / memory_folder(0)) if slot.read().sealed
    ]
    slot.set_upload(UploadState.BUSY)
    with uploading(url, tmp_path) as (uploader, news):
        assert uploader.drain(DEADLINE_S)
    assert news.committed == [5]
    assert (payload.stat().st_ino, payload.stat().st_mtime_ns) == (sent.st_ino, sent.st_mtime_ns)


def test_upload_that_is_not_what_host_memory_holds_is_sent_again(url: str, tmp_path: Path) -> None:
    upload_part(url, tmp_path, 1)
    [slot] = [
        slot for slot in slotfile.open_existing(tmp_path / memory_folder(0)) if slot.read().sealed
    ]
    slot.invalidate()
    with slot.owned as owned:
        owned[-1] ^= 1
    slot.seal(
        Seal(
            rank=0,
            attempt=1,
            step=5,
            table_digest=slot.table_digest,
            sealed_at_ns=2,
            upload=UploadState.BUSY,
        ),
        b"{}",
    )
    with uploading(url, tmp_path) as (uploader, news):
        assert uploader.drain(DEADLINE_S)
    assert news.committed == [5]
    assert catalog.verify(Storage(url), 5, lambda num_bytes: None) == []


def test_new_coordinator_commits_what_the_last_one_left(url: str, tmp_path: Path) -> None:
    """All parts are in storage, and the agent that should commit them has died."""
    stager = make_stager(tmp_path / "memory", make_tensors(5))
    stager.save(5, {}, upload=True, common_step=-1)
    with uploading(url, tmp_path / "memory", coordinator=False) as (uploader, _):
        assert uploader.drain(DEADLINE_S)
    assert Storage(url).committed_steps() == []
    with uploading(url, tmp_path / "elsewhere") as (uploader, news):
        assert uploader.drain(DEADLINE_S)
    assert news.committed == [5]
    assert Storage(url).committed_steps() == [5]


def upload_part(
    url: str, memory: Path, attempt: int, *, rank: int = 0, savers: Sequence[int] = (0,)
) -> None:
    """Upload step 5 of an attempt without committing it."""
    tensors = make_tensors(5, rank=rank, ranks=len(savers))
    stager = make_stager(memory, tensors, rank=rank, world_size=len(savers), attempt=attempt)
    stager.save(5, {}, upload=True, common_step=-1)
    with uploading(url, memory, local=(rank,), savers=savers, coordinator=False) as (uploader, _):
        assert uploader.drain(DEADLINE_S)


@both_stores
def test_of_two_attempts_exactly_one_commits_a_step(url: str, tmp_path: Path) -> None:
    storage = Storage(url)
    coordinators = []
    for attempt in (1, 2):
        upload_part(url, tmp_path / f"memory-{attempt}", attempt)
        coordinators.append(make_coordinator(storage, [0], timeout_s=30.0))
        coordinators[-1].expect(5, attempt, sealed_at_ns=0)
    together = threading.Barrier(2)
    said: list[Committed | Trouble] = []

    def commit(coordinator: Coordinator) -> None:
        together.wait(DEADLINE_S)
        said.extend(coordinator.poll())

    threads = [threading.Thread(target=commit, args=(one,)) for one in coordinators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)

    # To both the checkpoint exists; one attempt made it, and the other's folder is gone.
    assert [type(one) for one in said] == [Committed, Committed]
    winner = storage.read_commit(5)[0].attempt
    folders = [entry.name for entry in storage.entries("") if entry.name.startswith("step-")]
    assert folders == [f"step-00000005.{winner}"]
    restored = make_tensors(9)
    load_alone(storage, 5, restored)
    assert same_bits(restored, make_tensors(5))


def test_step_committed_by_an_earlier_attempt_is_not_written_again(
    url: str, tmp_path: Path
) -> None:
    commit_steps(url, tmp_path / "memory", [5])
    before = (tmp_path / "store/job-1/commits/00000005.json").stat().st_mtime_ns
    stager = make_stager(tmp_path / "memory-2", make_tensors(5), attempt=2)
    stager.save(5, {}, upload=True, common_step=-1)
    with uploading(url, tmp_path / "memory-2") as (uploader, news):
        assert uploader.drain(DEADLINE_S)
    assert news.trouble == []
    assert not (tmp_path / "store/job-1/step-00000005.2").exists()
    assert (tmp_path / "store/job-1/commits/00000005.json").stat().st_mtime_ns == before


def test_damaged_commit_record_is_set_aside_for_a_whole_checkpoint(
    url: str, tmp_path: Path
) -> None:
    commit_steps(url, tmp_path / "memory", [5])
    record = tmp_path / "store/job-1/commits/00000005.json"
    storage = Storage(url)
    upload_record = record.read_bytes()
    record.unlink()
    upload_part(url, tmp_path / "memory-2", 2)
    record.write_bytes(upload_record[:-3])
    coordinator = make_coordinator(storage, [0], timeout_s=30.0)
    coordinator.expect(5, 2, sealed_at_ns=0)
    assert [type(one) for one in coordinator.poll()] == [Committed]
    assert storage.read_commit(5)[0].attempt == 2
    assert [entry.name for entry in storage.entries("quarantine")] == ["00000005.0.json"]


def test_half_a_checkpoint_of_a_larger_world_is_never_committed(url: str, tmp_path: Path) -> None:
    """Two of four parts arrived; later the job runs with two savers."""
    for rank in (0, 1):
        upload_part(url, tmp_path / "memory", 1, rank=rank, savers=(0, 1, 2, 3))
    coordinator = make_coordinator(Storage(url), [0, 1], timeout_s=0.0)
    coordinator.adopt()
    assert coordinator.is_waiting
    assert list(coordinator.poll()) == []
    assert not coordinator.is_waiting
    assert Storage(url).committed_steps() == []


def test_part_that_does_not_arrive_in_time_is_reported_and_its_room_given_back(
    url: str, tmp_path: Path
) -> None:
    upload_part(url, tmp_path / "memory", 1, rank=0, savers=(0, 1))
    storage = Storage(url)
    coordinator = make_coordinator(storage, [0, 1], timeout_s=0.0)
    coordinator.expect(5, 1, sealed_at_ns=0)
    [trouble] = coordinator.poll()
    assert isinstance(trouble, Trouble)
    assert (trouble.step, trouble.stage) == (5, "commit")
    assert "parts of 1 of 2 saver ranks did not arrive" in trouble.detail
    assert "rank 1" in trouble.detail
    assert storage.entries("step-00000005.1") == []


def test_part_shorter_than_its_record_is_never_committed(url: str, tmp_path: Path) -> None:
    upload_part(url, tmp_path / "memory", 1)
    payload = tmp_path / "store/job-1/step-00000005.1/__0_0.distcp"
    payload.write_bytes(payload.read_bytes()[:-1])
    coordinator = make_coordinator(Storage(url), [0], timeout_s=30.0)
    coordinator.expect(5, 1, sealed_at_ns=0)
    [trouble] = coordinator.poll()
    assert isinstance(trouble, Trouble)
    assert "__0_0.distcp has" in trouble.detail
    assert Storage(url).committed_steps() == []


@both_stores
def test_newest_checkpoints_are_kept_and_older_ones_deleted(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path, [1, 2, 3, 4], keep=2)
    storage = Storage(url)
    assert storage.committed_steps() == [4, 3]
    folders = sorted(entry.name for entry in storage.entries("") if entry.is_folder)
    assert [name for name in folders if name.startswith("step-")] == [
        "step-00000003.1",
        "step-00000004.1",
    ]


def test_remains_of_an_attempt_are_swept_once_nobody_can_be_writing(
    url: str, tmp_path: Path
) -> None:
    upload_part(url, tmp_path / "remains", 1, rank=0, savers=(0, 1))
    root = tmp_path / "store/job-1"
    commit_steps(url, tmp_path / "memory-1", [6])
    assert (root / "step-00000005.1").exists()
    for path in (root / "step-00000005.1").rglob("*"):
        os.utime(path, (1, 1))
    commit_steps(url, tmp_path / "memory-2", [7])
    assert not (root / "step-00000005.1").exists()
    assert Storage(url).committed_steps() == [7, 6]


def test_full_disk_is_reported_in_words_and_the_next_upload_succeeds(
    small_tmpfs: Callable[[int], Path], tmp_path: Path
) -> None:
    disk = small_tmpfs(3 << 20)
    url = f"file://{disk}/job-1"
    weights = torch.arange(1 << 18, dtype=torch.float32)
    stager = make_stager(tmp_path, [NamedTensor("w", weights, (1 << 18,), (0,))])
    (disk / "somebody-else").write_bytes(bytes(5 << 19))
    with uploading(url, tmp_path, keep=1) as (uploader, news):
        stager.save(1, {}, upload=True, common_step=-1)
        assert uploader.drain(DEADLINE_S)
        [(step, stage, detail)] = news.trouble
        assert (step, stage) == (1, "upload")
        assert "No space left on device" in detail
        assert url in detail
        assert upload_states(tmp_path) == {1: UploadState.FAILED}
        # Training goes on, the failed slot is free again, and nothing half written stays.
        assert not stager.upload_busy
        for other in range(2, 6):
            assert stager.save(other, {}, upload=False, common_step=other - 1)
        assert list(disk.rglob("*.distcp*")) == []

        (disk / "somebody-else").unlink()
        stager.save(6, {}, upload=True, common_step=5)
        assert uploader.drain(DEADLINE_S)
        assert news.committed == [6]
    restored = [NamedTensor("w", torch.zeros(1 << 18), (1 << 18,), (0,))]
    load_alone(Storage(url), 6, restored)
    assert torch.equal(restored[0].tensor, weights)


def test_url_that_cannot_be_written_fails_the_upload_and_not_the_uploader(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    stager = make_stager(tmp_path, make_tensors(1))
    with uploading(f"file://{tmp_path}/file/job-1", tmp_path) as (_, news):
        for step in (1, 2):
            stager.save(step, {}, upload=True, common_step=step - 1)
            wait_for(lambda step=step: len(news.trouble) == step, f"trouble of step {step}")
    assert [(step, stage) for step, stage, _ in news.trouble] == [(1, "upload"), (2, "upload")]
    assert "Not a directory" in news.trouble[0][2]


def test_unknown_kind_of_store_fails_the_upload_and_not_the_uploader(tmp_path: Path) -> None:
    stager = make_stager(tmp_path, make_tensors(1))
    stager.save(1, {}, upload=True, common_step=-1)
    with uploading("nosuch://bucket/job", tmp_path) as (_, news):
        wait_for(lambda: bool(news.trouble), "trouble")
    assert "nosuch" in news.trouble[0][2]


def test_store_that_hangs_fails_the_upload_at_its_deadline(stuck_url: str, tmp_path: Path) -> None:
    stager = make_stager(tmp_path, make_tensors(1))
    # Also of the step that is stored in the end, by threads that give way to all others.
    with uploading(stuck_url, tmp_path, timeout_s=3.0) as (uploader, news):
        assert uploader.drain(DEADLINE_S)
        StuckFileSystem.stuck.set()
        stager.save(1, {}, upload=True, common_step=-1)
        wait_for(lambda: bool(news.trouble), "trouble")
        step, stage, detail = news.trouble[0]
        assert (step, stage) == (1, "upload")
        assert "no answer in 3 s" in detail

        StuckFileSystem.stuck.clear()
        StuckFileSystem.let_go.set()
        wait_for(lambda: not StuckFileSystem.under_way, "the calls that hung to come back")
        stager.save(2, {}, upload=True, common_step=1)
        wait_for(lambda: news.committed == [2], "the next upload")


def test_stopping_ends_a_hanging_upload_and_leaves_it_wanted(
    stuck_url: str, tmp_path: Path
) -> None:
    stager = make_stager(tmp_path, make_tensors(1))
    with uploading(stuck_url, tmp_path) as (uploader, news):
        assert uploader.drain(DEADLINE_S)
        StuckFileSystem.stuck.set()
        stager.save(1, {}, upload=True, common_step=-1)
        wait_for(lambda: upload_states(tmp_path) == {1: UploadState.BUSY}, "the upload")
        uploader.stop()
    assert news.trouble == []
    assert upload_states(tmp_path) == {1: UploadState.WANTED}
    StuckFileSystem.stuck.clear()
    StuckFileSystem.let_go.set()
    # In this store, a file that is opened late replaces the one that was written meanwhile.
    wait_for(lambda: not StuckFileSystem.under_way, "the call that hung to come back")
    with uploading(stuck_url, tmp_path) as (uploader, news):
        assert uploader.drain(DEADLINE_S)
    assert news.trouble == []
    assert news.committed == [1]


def test_slots_made_anew_are_followed(url: str, tmp_path: Path) -> None:
    with uploading(url, tmp_path) as (uploader, news):
        make_stager(tmp_path, make_tensors(1)).save(1, {}, upload=True, common_step=-1)
        assert uploader.drain(DEADLINE_S)
        wider = make_tensors(2, width=32)
        make_stager(tmp_path, wider, attempt=2).save(2, {}, upload=True, common_step=-1)
        assert uploader.drain(DEADLINE_S)
    assert news.committed == [1, 2]
    restored = make_tensors(9, width=32)
    load_alone(Storage(url), 2, restored)
    assert same_bits(restored, wider)


def test_drain_says_when_time_is_up(url: str, tmp_path: Path) -> None:
    stager = make_stager(tmp_path, make_tensors(1))
    stager.save(1, {}, upload=True, common_step=-1)
    # The other saver's part never comes.
    with uploading(url, tmp_path, savers=(0, 1)) as (uploader, _):
        assert not uploader.drain(0.2)


def test_uploader_yields_the_processor_to_training(url: str, tmp_path: Path) -> None:
    with uploading(url, tmp_path) as (uploader, _):
        assert uploader.drain(DEADLINE_S)
        [thread] = [one for one in threading.enumerate() if one.name == "checkpoint-upload-job-1"]
        assert thread.native_id is not None
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id) >= 10


@pytest.mark.parametrize("num_steps", [6])
def test_training_that_always_asks_gets_its_newest_steps_stored(
    url: str, tmp_path: Path, num_steps: int
) -> None:
    """As the trainer does it: an upload is asked for when none is under way."""
    tensors = make_tensors(0)
    stager = make_stager(tmp_path, tensors)
    asked = []
    with uploading(url, tmp_path, keep=num_steps) as (uploader, news):
        for step in range(1, num_steps + 1):
            upload = not stager.upload_busy or step == num_steps
            tensors[0].tensor.fill_(step)
            stager.save(step, {"step": step}, upload=upload, common_step=step - 1)
            asked += [step] * upload
        assert uploader.drain(DEADLINE_S)
    assert news.trouble == []
    assert num_steps in news.committed
    assert set(news.committed) <= set(asked)
    for step in news.committed:
        restored = make_tensors(9)
        assert load_alone(Storage(url), step, restored) == {"step": step}
        assert torch.all(restored[0].tensor == step)
