from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint import memory as host_memory
from checkpoint.core.names import memory_folder
from checkpoint.core.slots import UploadState
from checkpoint.errors import CorruptCheckpointError
from checkpoint.restore.restore import SealedStep, load_memory, sealed_steps
from checkpoint.stage import allocation, slotfile
from checkpoint.stage.payload import NamedTensor, make_table
from checkpoint.stage.slotfile import SlotFile, slot_path
from outlast.errors import FatalError
from tests.checkpoint.helpers import make_stager, make_tensors, same_bits

FOLDER = memory_folder(0)


def steps_in(folder: Path, tensors: list[NamedTensor]) -> list[int]:
    return [sealed.step for sealed in sealed_steps(folder, tensors)]


def slots_by_step(folder: Path) -> dict[int, SlotFile]:
    return {slot.read().step: slot for slot in slotfile.open_existing(folder) if slot.read().sealed}


def test_saved_state_comes_back_bitwise(tmp_path: Path) -> None:
    saved = make_tensors(1)
    stager = make_stager(tmp_path, saved)
    stager.save(7, {"step": 7, "rng": "ab", "rates": [0.1]}, upload=False, common_step=-1)
    assert stager.newest_sealed == 7

    restored = make_tensors(2)
    assert not same_bits(saved, restored)
    extra = load_memory(tmp_path / FOLDER, SealedStep(7, 1), restored)
    assert extra == {"step": 7, "rng": "ab", "rates": [0.1]}
    assert same_bits(saved, restored)


def test_later_change_of_a_tensor_leaves_the_sealed_state_alone(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    stager = make_stager(tmp_path, tensors)
    stager.save(1, {}, upload=False, common_step=-1)
    for named in tensors:
        named.tensor.zero_()
    restored = make_tensors(2)
    load_memory(tmp_path / FOLDER, SealedStep(1, 1), restored)
    assert same_bits(restored, make_tensors(1))


def test_three_newest_steps_are_held_and_the_common_one_stays(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    stager = make_stager(tmp_path, tensors)
    for step in range(1, 8):
        stager.save(step, {}, upload=False, common_step=2)
    assert steps_in(tmp_path / FOLDER, tensors) == [7, 6, 2]


def test_next_attempt_finds_what_the_last_one_sealed(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    make_stager(tmp_path, tensors).save(5, {"a": 1}, upload=False, common_step=-1)
    before = slot_path(tmp_path / FOLDER, 0).stat().st_ino

    second = make_stager(tmp_path, tensors, attempt=2)
    assert slot_path(tmp_path / FOLDER, 0).stat().st_ino == before
    assert second.newest_sealed == 5
    assert load_memory(tmp_path / FOLDER, SealedStep(5, 1), make_tensors(3)) == {"a": 1}


def test_steps_beyond_the_resumed_one_are_forgotten(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    first = make_stager(tmp_path, tensors)
    for step in (3, 4, 5):
        first.save(step, {}, upload=False, common_step=step - 1)

    second = make_stager(tmp_path, tensors, attempt=2)
    second.resumed(4)
    assert steps_in(tmp_path / FOLDER, tensors) == [4, 3]
    assert second.newest_sealed == 4


def test_first_save_forgets_what_an_abandoned_attempt_left(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    first = make_stager(tmp_path, tensors)
    for step in (10, 11, 12):
        first.save(step, {}, upload=False, common_step=step - 1)

    second = make_stager(tmp_path, tensors, attempt=2)
    second.save(6, {"attempt": 2}, upload=False, common_step=-1)
    assert steps_in(tmp_path / FOLDER, tensors) == [6]


def test_the_same_step_of_two_attempts_is_two_states(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    make_stager(tmp_path, tensors).save(5, {"by": 1}, upload=False, common_step=-1)
    second = make_stager(tmp_path, tensors, attempt=2)
    second.resumed(4)
    second.save(5, {"by": 2}, upload=False, common_step=4)
    assert sealed_steps(tmp_path / FOLDER, tensors) == [SealedStep(5, 2)]
    assert load_memory(tmp_path / FOLDER, SealedStep(5, 2), make_tensors(3)) == {"by": 2}
    with pytest.raises(CorruptCheckpointError, match="no such step of attempt 1"):
        load_memory(tmp_path / FOLDER, SealedStep(5, 1), make_tensors(3))


def test_other_tensors_make_the_slots_anew(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    make_stager(tmp_path, tensors).save(5, {}, upload=False, common_step=-1)
    wider = make_tensors(1, width=16)
    assert sealed_steps(tmp_path / FOLDER, wider) == []
    with pytest.raises(CorruptCheckpointError, match="no such step"):
        load_memory(tmp_path / FOLDER, SealedStep(5, 1), wider)

    stager = make_stager(tmp_path, wider, attempt=2)
    assert stager.newest_sealed == -1
    assert sealed_steps(tmp_path / FOLDER, tensors) == []


def test_same_size_under_another_name_is_not_taken_for_the_same(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    make_stager(tmp_path, tensors).save(5, {}, upload=False, common_step=-1)
    first, *rest = tensors
    renamed = [NamedTensor("other", first.tensor, first.global_shape, first.offsets), *rest]
    assert sealed_steps(tmp_path / FOLDER, renamed) == []
    assert make_stager(tmp_path, renamed).newest_sealed == -1


def test_torn_slot_is_not_a_sealed_step(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    stager = make_stager(tmp_path, tensors)
    stager.save(1, {}, upload=False, common_step=-1)
    stager.save(2, {}, upload=False, common_step=1)
    # What a kill in the middle of a copy leaves: the commit word is cleared first.
    slots_by_step(tmp_path / FOLDER)[2].invalidate()
    assert steps_in(tmp_path / FOLDER, tensors) == [1]


def test_damaged_extra_is_noticed(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    make_stager(tmp_path, tensors).save(1, {"step": 1}, upload=False, common_step=-1)
    slot = slots_by_step(tmp_path / FOLDER)[1]
    slot.map[slotfile.HEADER_BYTES] ^= 1
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        load_memory(tmp_path / FOLDER, SealedStep(1, 1), tensors)


def test_missing_or_foreign_folder_holds_nothing(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    assert sealed_steps(tmp_path / "none", tensors) == []
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "shards.json").write_text("{}")
    (folder / "slot-0").write_bytes(b"x" * 70_000)
    assert sealed_steps(folder, tensors) == []
    assert make_stager(tmp_path, tensors).newest_sealed == -1


def test_extra_that_does_not_fit_is_refused_before_anything_is_lost(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    stager = make_stager(tmp_path, tensors)
    stager.save(1, {}, upload=False, common_step=-1)
    with pytest.raises(ValueError, match="at most 61440"):
        stager.save(2, {"big": "x" * 70_000}, upload=False, common_step=1)
    with pytest.raises(TypeError):
        stager.save(2, {"tensor": torch.zeros(1)}, upload=False, common_step=1)
    stager.save(2, {"fits": "x" * 61_000}, upload=False, common_step=1)
    assert steps_in(tmp_path / FOLDER, tensors) == [2, 1]


def test_slot_that_is_being_read_is_not_overwritten(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    stager = make_stager(tmp_path, tensors)
    stager.save(1, {}, upload=False, common_step=-1)
    reader = slots_by_step(tmp_path / FOLDER)[1]
    assert reader.try_lock(exclusive=False)
    for step in range(2, 8):
        stager.save(step, {}, upload=False, common_step=step - 1)
    assert 1 in steps_in(tmp_path / FOLDER, tensors)
    reader.unlock()
    stager.save(8, {}, upload=False, common_step=7)
    assert 1 not in steps_in(tmp_path / FOLDER, tensors)


def test_save_says_when_every_slot_is_needed(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    stager = make_stager(tmp_path, tensors)
    stager.save(1, {}, upload=True, common_step=-1)
    slots_by_step(tmp_path / FOLDER)[1].set_upload(UploadState.BUSY)
    stager.save(2, {}, upload=True, common_step=1)
    assert stager.save(3, {}, upload=False, common_step=2)
    assert not stager.save(4, {}, upload=False, common_step=3)
    assert stager.newest_sealed == 3


def test_newer_wanted_upload_replaces_the_waiting_one(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    stager = make_stager(tmp_path, tensors)
    stager.save(1, {}, upload=True, common_step=-1)
    stager.save(2, {}, upload=True, common_step=1)
    states = {step: slot.read().upload for step, slot in slots_by_step(tmp_path / FOLDER).items()}
    assert states == {1: UploadState.NONE, 2: UploadState.WANTED}


def test_saving_a_step_again_can_still_ask_for_its_upload(tmp_path: Path) -> None:
    tensors = make_tensors(1)
    stager = make_stager(tmp_path, tensors)
    stager.save(1, {}, upload=False, common_step=-1)
    assert not stager.upload_busy
    stager.save(1, {}, upload=True, common_step=-1)
    assert stager.upload_busy
    assert steps_in(tmp_path / FOLDER, tensors) == [1]


def test_tmpfs_too_small_is_refused_with_needed_and_free_bytes(
    small_tmpfs: Callable[[int], Path],
) -> None:
    memory = small_tmpfs(1 << 20)
    tensors = [NamedTensor("w", torch.zeros(1 << 18), (1 << 18,), (0,))]
    table = make_table(0, 1, tensors)
    needed = 3 * slotfile.slot_bytes(table.payload_bytes, table.owned_bytes)
    with pytest.raises(FatalError, match=rf"need {needed} bytes and \d+ bytes are free"):
        make_stager(memory, tensors)
    # What was taken on the way is given back.
    assert shutil.disk_usage(memory).used <= 16 << 10


@pytest.mark.parametrize("left_bytes", [1 << 16, 0, None])
def test_room_on_a_tmpfs_is_no_more_than_the_memory_that_the_container_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_bytes: int | None
) -> None:
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: left_bytes)
    free = host_memory.free_bytes(tmp_path)
    on_disk = shutil.disk_usage(tmp_path).free
    # Others write to the disk meanwhile.
    assert free == (pytest.approx(on_disk, rel=0.2) if left_bytes is None else left_bytes)
    if left_bytes is not None:
        with pytest.raises(FatalError, match=f"{left_bytes} bytes are free"):
            make_stager(tmp_path, [NamedTensor("w", torch.zeros(1 << 18), (1 << 18,), (0,))])


def test_tmpfs_that_fills_up_meanwhile_is_refused_too(
    small_tmpfs: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a node allocate at the same time: free space seen may be gone."""
    memory = small_tmpfs(1 << 20)
    monkeypatch.setattr(allocation, "free_bytes", lambda folder: 1 << 40)
    with pytest.raises(FatalError, match="bytes are free"):
        make_stager(memory, [NamedTensor("w", torch.zeros(1 << 18), (1 << 18,), (0,))])
    assert list((memory / FOLDER).glob("*slot*")) == []
    assert list((memory / FOLDER).glob(".new-*")) == []
    # Room for smaller ones, and no trace of the failure.
    assert make_stager(memory, make_tensors(1)).newest_sealed == -1
