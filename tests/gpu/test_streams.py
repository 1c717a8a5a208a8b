"""Copies between a GPU and host memory, beside what the GPU computes, and the moments it tells."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from checkpoint.core.names import memory_folder
from checkpoint.restore.restore import SealedStep, load_memory
from checkpoint.stage import stager as stage
from checkpoint.stage.copy_stream import CopyStream, copy_stream_for
from tests.checkpoint.helpers import make_stager, make_tensors, same_bits
from tests.trainer.test_offload import gradients
from trainer.parallel.timeline import timed, timeline_of

FOLDER = memory_folder(0)
DEPTH = 4


def test_a_gpu_copies_what_a_tensor_held_when_it_was_saved(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch for each tensor.
    monkeypatch.setattr(stage, "BATCH_BYTES", 1)
    # Copies that take a while beside what overwrites their sources.
    tensors = [
        named._replace(tensor=named.tensor.to(device)) for named in make_tensors(1, width=8 << 20)
    ]
    saved = make_tensors(1, width=8 << 20)
    stager = make_stager(tmp_path, tensors, copy_stream=copy_stream_for(device, ranks_here=1))
    for step in range(1, 6):
        stager.save(step, {"step": step}, upload=False, common_step=step - 1)
        for named, expected in zip(tensors, saved, strict=True):
            stager.wait_before_write(named.tensor)
            named.tensor.zero_()
            named.tensor.copy_(expected.tensor, non_blocking=True)
    stager.finish(20.0)
    restored = make_tensors(2, width=8 << 20)
    load_memory(tmp_path / FOLDER, SealedStep(5, 1), restored)
    assert same_bits(restored, saved)
    for named in tensors:
        named.tensor.zero_()
    # A slot of a former attempt goes back to the device.
    load_memory(tmp_path / FOLDER, SealedStep(5, 1), tensors)
    assert all(
        torch.equal(named.tensor.cpu(), expected.tensor)
        for named, expected in zip(tensors, saved, strict=True)
    )
    stager.close()


# Cycles of a GPU's clock, about a second: far longer than a copy of the bytes below takes.
BUSY_CYCLES = 2_000_000_000
COPIED_BYTES = 64 << 20


def opened(device: torch.device) -> tuple[CopyStream, Tensor]:
    """A stream of copies and the host memory that it copies into, pinned by then."""
    memory = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    stream = copy_stream_for(device, ranks_here=1)
    stream.open(memory)
    stream.begin()
    return stream, memory


def test_memory_of_copies_is_pinned_until_the_stream_is_closed(device: torch.device) -> None:
    stream, memory = opened(device)
    assert memory.is_pinned()
    stream.close()
    assert not memory.is_pinned()


def test_a_copy_ends_while_the_gpu_still_computes(device: torch.device) -> None:
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    stream, memory = opened(device)
    torch.cuda.synchronize(device)
    stream.begin()
    torch.cuda._sleep(BUSY_CYCLES)
    stream.copy([source], [memory]).wait()
    assert not torch.cuda.current_stream(device).query()
    assert bool((memory == 1).all())
    torch.cuda.synchronize(device)
    stream.close()


def test_a_copy_comes_after_what_was_computed_and_before_what_overwrites_it(
    device: torch.device,
) -> None:
    """The host waits for neither."""
    # Filled once already: a kernel's first use may wait for the device.
    source = torch.full((COPIED_BYTES,), 3, dtype=torch.uint8, device=device)
    stream, memory = opened(device)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(BUSY_CYCLES)
    source.fill_(1)
    stream.begin()
    copied = stream.copy([source], [memory])
    copied.wait_before_write()
    source.fill_(2)
    assert not torch.cuda.current_stream(device).query()
    copied.wait()
    assert bool((memory == 1).all())
    torch.cuda.synchronize(device)
    assert bool((source == 2).all())
    stream.close()


def test_a_gpu_computes_with_what_has_come_back(device: torch.device) -> None:
    """Its streams copy while it computes; memory that one of them still reads is given to none."""
    torch.manual_seed(0)
    # Copies that take a while, beside products that would overwrite what they read.
    layers = [nn.Linear(1024, 1024, device=device) for _ in range(DEPTH)]
    x = torch.randn(8192, 1024, device=device).requires_grad_()
    plain = gradients(layers, x, offload=None)
    for _ in range(5):
        for one, other in zip(plain, gradients(layers, x, offload=True), strict=True):
            assert torch.equal(one, other)


def test_moments_of_a_gpu_are_those_of_the_wall_clock(device: torch.device) -> None:
    """The host gives work and is done at once; what is told is when the device was."""
    timeline = timeline_of(device)
    weight = torch.randn(4096, 4096, device=device)
    found: list[int] = []

    def work() -> None:
        out = weight
        for _ in range(50):
            out = out @ weight

    work()
    torch.cuda.synchronize()
    for _ in range(3):
        timeline.forget()
        began_ns = time.perf_counter_ns()
        with timed(timeline, found.append):
            work()
        given_ns = time.perf_counter_ns() - began_ns
        timeline.finish(60.0)
        wall_ns = time.perf_counter_ns() - began_ns
        assert given_ns < found[-1] / 2
        assert found[-1] == pytest.approx(wall_ns, rel=0.2)
