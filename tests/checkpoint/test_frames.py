"""A frame around raw bytes is, to the byte, the file that torch writes."""

from __future__ import annotations

import io
import resource

import pytest
import torch
from torch.serialization import get_crc32_options, set_crc32_options

from checkpoint.torch_format.frames import frame_of


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "int64", "bool"])
@pytest.mark.parametrize("shape", [(3, 5), (), (7,), (0, 4), (2, 1, 3)])
def test_framed_bytes_are_what_torch_writes_and_reads(dtype: str, shape: tuple[int, ...]) -> None:
    kind = getattr(torch, dtype)
    tensor = (torch.randn(shape) * 3).to(kind)
    frame = frame_of(kind, shape)
    raw = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    framed = frame.prefix + raw + frame.suffix

    before = get_crc32_options()
    set_crc32_options(False)
    try:
        file = io.BytesIO()
        torch.save(tensor, file)
    finally:
        set_crc32_options(before)
    assert framed == file.getvalue()
    assert torch.equal(torch.load(io.BytesIO(framed), weights_only=True), tensor)
    # Where the raw bytes begin, vector copies are aligned.
    assert len(frame.prefix) % 64 == 0


def test_a_frame_of_a_large_tensor_takes_no_memory() -> None:
    options, before = get_crc32_options(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    frame = frame_of(torch.float32, (1 << 18, 1 << 12))
    assert len(frame.prefix) + len(frame.suffix) < 4096
    # In KiB; the tensor has 4 GiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10
    assert get_crc32_options() is options
