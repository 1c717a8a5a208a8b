"""Saving beside the computation: what is sealed when, and who waits for what.

The same stager on a copy_stream whose copies end late, as a GPU's do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.core.names import memory_folder
from checkpoint.restore.restore import SealedStep, load_memory, sealed_steps
from checkpoint.stage import copy_stream as stream_module
from checkpoint.stage import slotfile
from checkpoint.stage import stager as stage
from checkpoint.stage.copy_stream import ThreadCopyStream, copy_stream_for
from checkpoint.stage.payload import NamedTensor
from checkpoint.stage.stager import Stager
from tests.checkpoint.copy_streams import GatedCopyStream
from tests.checkpoint.helpers import make_stager, make_tensors, same_bits, wait_for

FOLDER = memory_folder(0)


@pytest.fixture(autouse=True)
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch for each tensor."""
    monkeypatch.setattr(stage, "BATCH_BYTES", 1)


@pytest.fixture
def tensors() -> list[NamedTensor]:
    return make_tensors(1)


@pytest.fixture
def copy_stream() -> Iterator[GatedCopyStream]:
    copy_stream = GatedCopyStream(permits=0)
    yield copy_stream
    copy_stream.let(1000)
    copy_stream.close()


def steps(folder: Path, tensors: list[NamedTensor]) -> list[int]:
    return [sealed.step for sealed in sealed_steps(folder / FOLDER, tensors)]


def save(stager: Stager, step: int) -> bool:
    return stager.save(step, {"step": step}, upload=False, common_step=step - 1)


def test_save_returns_at_once_and_the_slot_is_sealed_behind_the_last_copy(
    tmp_path: Path, tensors: list[NamedTensor], copy_stream: GatedCopyStream
) -> None:
    stager = make_stager(tmp_path, tensors, copy_stream=copy_stream)
    assert save(stager, 1)
    assert stager.newest_sealed == -1
    copy_stream.let(len(tensors) - 1)
    copy_stream.copies[-2].wait()
    assert steps(tmp_path, tensors) == []
    copy_stream.let(1)
    wait_for(lambda: stager.newest_sealed == 1, "the slot to be sealed")
    assert load_memory(tmp_path / FOLDER, SealedStep(1, 1), make_tensors(2)) == {"step": 1}


def test_whoever_changes_a_tensor_waits_for_its_copy_and_no_other(
    tmp_path: Path, tensors: list[NamedTensor], copy_stream: GatedCopyStream
) -> None:
    stager = make_stager(tmp_path, tensors, copy_stream=copy_stream)
    save(stager, 1)
    changed = threading.Event()

    def change() -> None:
        stager.wait_before_write(tensors[1].tensor)
        tensors[1].tensor.zero_()
        changed.set()

    changer = threading.Thread(target=change)
    changer.start()
    copy_stream.let(1)
    copy_stream.copies[0].wait()
    assert not changed.is_set()
    copy_stream.let(1)
    changer.join(20.0)
    assert changed.is_set()
    assert [copied.was_held for copied in copy_stream.copies[:3]] == [False, True, False]

    copy_stream.let(len(tensors) - 2)
    stager.finish(20.0)
    restored = make_tensors(2)
    load_memory(tmp_path / FOLDER, SealedStep(1, 1), restored)
    assert same_bits(restored, make_tensors(1))


def test_a_buffer_that_holds_many_tensors_waits_for_the_last_of_them(
    tmp_path: Path, copy_stream: GatedCopyStream
) -> None:
    buffer = torch.arange(12.0)
    tensors = [NamedTensor(f"part-{at}", buffer[at : at + 4], (4,), (0,)) for at in (0, 4, 8)]
    stager = make_stager(tmp_path, tensors, copy_stream=copy_stream)
    save(stager, 1)
    copy_stream.let(3)
    stager.wait_before_write(buffer[2:7])
    stager.wait_before_write(torch.zeros(3))
    assert [copied.was_held for copied in copy_stream.copies] == [False, True, False]


def test_a_save_ends_the_one_before_it(tmp_path: Path, tensors: list[NamedTensor]) -> None:
    stager = make_stager(tmp_path, tensors, copy_stream=GatedCopyStream(after_s=0.02))
    for step in range(1, 5):
        save(stager, step)
    assert stager.newest_sealed >= 3
    stager.finish(20.0)
    assert steps(tmp_path, tensors)[:2] == [4, 3]
    stager.close()


def test_a_thread_copies_what_a_tensor_held_when_it_was_saved(
    tmp_path: Path, tensors: list[NamedTensor]
) -> None:
    stager = make_stager(tmp_path, tensors, copy_stream=ThreadCopyStream())
    for step in (1, 2):
        save(stager, step)
        for named in tensors:
            stager.wait_before_write(named.tensor)
            named.tensor.zero_()
    stager.close()
    restored = make_tensors(2)
    load_memory(tmp_path / FOLDER, SealedStep(1, 1), restored)
    assert same_bits(restored, make_tensors(1))


def test_a_copy_that_fails_in_its_thread_is_raised_and_later_ones_go_on() -> None:
    copy_stream = ThreadCopyStream()
    failed = copy_stream.copy([torch.zeros(3)], [torch.zeros(2)])
    for wait in (failed.wait, failed.wait_before_write):
        with pytest.raises(RuntimeError):
            wait()
    into = torch.zeros(2)
    copy_stream.copy([torch.ones(2)], [into]).wait()
    assert into.tolist() == [1.0, 1.0]
    copy_stream.close()


def test_a_slot_is_not_sealed_when_any_of_its_copies_failed(
    tmp_path: Path, tensors: list[NamedTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    stager = make_stager(tmp_path, tensors, copy_stream=ThreadCopyStream())
    save(stager, 1)
    stager.finish(20.0)
    copy = stream_module.copy_by_torch
    calls = iter(range(1000))

    def fails_first(*arguments: Any, **named: Any) -> None:
        if next(calls) == 0:
            raise RuntimeError("the device is gone")
        copy(*arguments, **named)

    monkeypatch.setattr(stream_module, "copy_by_torch", fails_first)
    save(stager, 2)
    with pytest.raises(RuntimeError, match="the device is gone"):
        stager.finish(20.0)
    assert steps(tmp_path, tensors) == [1]
    save(stager, 3)
    stager.close()
    assert steps(tmp_path, tensors) == [3, 1]


def test_on_a_cpu_a_thread_copies_where_there_is_a_core_for_it() -> None:
    cores = len(os.sched_getaffinity(0))
    cpu = torch.device("cpu")
    assert not copy_stream_for(cpu, ranks_here=cores).is_async
    beside = copy_stream_for(cpu, ranks_here=cores - 1)
    assert beside.is_async
    beside.close()


def test_what_was_not_copied_to_the_end_is_no_step(
    tmp_path: Path, tensors: list[NamedTensor], copy_stream: GatedCopyStream
) -> None:
    copy_stream.let(len(tensors))
    stager = make_stager(tmp_path, tensors, copy_stream=copy_stream)
    save(stager, 1)
    stager.finish(20.0)
    save(stager, 2)
    with pytest.raises(TimeoutError, match=r"step 2 is not in host memory after 0\.1 s"):
        stager.finish(0.1)
    # As another process finds it after a kill.
    assert steps(tmp_path, tensors) == [1]


def test_what_was_aborted_while_it_was_copied_is_no_step(
    tmp_path: Path, tensors: list[NamedTensor], copy_stream: GatedCopyStream
) -> None:
    """A device that is freed ends its work with whatever there is by then."""
    is_void = threading.Event()
    stager = make_stager(
        tmp_path, tensors, copy_stream=copy_stream, is_void=lambda: is_void.is_set()
    )
    copy_stream.let(len(tensors))
    save(stager, 1)
    stager.finish(20.0)
    save(stager, 2)
    is_void.set()
    copy_stream.let(len(tensors))
    stager.leave()
    assert steps(tmp_path, tensors) == [1]


def test_a_stager_goes_on_in_another_attempt(
    tmp_path: Path, tensors: list[NamedTensor], copy_stream: GatedCopyStream
) -> None:
    copy_stream.let(1000)
    stager = make_stager(tmp_path, tensors, copy_stream=copy_stream)
    for step in (1, 2):
        save(stager, step)
    stager.leave()
    others = make_tensors(7)
    assert stager.rejoin(2, others)
    stager.resumed(1)
    assert steps(tmp_path, tensors) == [1]
    save(stager, 2)
    stager.finish(20.0)
    found = sealed_steps(tmp_path / FOLDER, tensors)
    assert [(sealed.step, sealed.attempt) for sealed in found] == [(2, 2), (1, 1)]
    into = make_tensors(0)
    load_memory(tmp_path / FOLDER, found[0], into)
    assert same_bits(into, others)


def left_after_step_1(
    folder: Path, tensors: list[NamedTensor], copy_stream: GatedCopyStream
) -> Stager:
    """A stager that has sealed one step and left its attempt."""
    copy_stream.let(1000)
    stager = make_stager(folder, tensors, copy_stream=copy_stream)
    save(stager, 1)
    stager.leave()
    return stager


def test_slots_that_others_have_replaced_are_not_gone_on_with(
    tmp_path: Path, tensors: list[NamedTensor], copy_stream: GatedCopyStream
) -> None:
    stager = left_after_step_1(tmp_path, tensors, copy_stream)
    assert not stager.rejoin(2, tensors[:-1])
    path = slotfile.slot_path(tmp_path / FOLDER, 0)
    path.with_name("other").write_bytes(path.read_bytes())
    path.with_name("other").rename(path)
    assert not stager.rejoin(2, tensors)
    path.unlink()
    assert not stager.rejoin(2, tensors)


def test_what_others_find_damaged_is_made_anew(
    tmp_path: Path, tensors: list[NamedTensor], copy_stream: GatedCopyStream
) -> None:
    stager = left_after_step_1(tmp_path, tensors, copy_stream)
    assert stager.rejoin(2, tensors)
    (tmp_path / FOLDER / slotfile.TABLE_FILE).unlink()
    assert not stager.rejoin(3, tensors)
    stager.close()
    assert not stager.rejoin(3, tensors)


def test_a_slot_whose_save_failed_can_be_used_again(
    tmp_path: Path, tensors: list[NamedTensor], copy_stream: GatedCopyStream
) -> None:
    stager = make_stager(tmp_path, tensors, copy_stream=copy_stream)
    copy_stream.breaks = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        save(stager, 1)
    copy_stream.breaks = False
    copy_stream.let(1000)
    for step in (1, 2, 3):
        save(stager, step)
    stager.finish(20.0)
    assert steps(tmp_path, tensors) == [3, 2, 1]
