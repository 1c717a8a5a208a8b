"""Kernels that only a GPU has, beside what they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from outlast.blackbox import Group
from tests.trainer.alone import batch_on, job, model_on
from tests.trainer.test_fused import PAIRS
from trainer.model.documents import Documents
from trainer.model.window import flex_attention, masked_flex_attention
from trainer.parallel import flash
from trainer.parallel.comm import Comm
from trainer.parallel.ring import Seen, ring_attention

SEQ_LEN = 512


def on(device: torch.device, given: Any) -> Any:
    if not isinstance(given, Tensor):
        return given
    moved = given.detach().to(device)
    return moved.requires_grad_() if given.requires_grad else moved


@pytest.mark.parametrize("name", PAIRS)
def test_a_compiled_operation_equals_its_eager_twin(device: torch.device, name: str) -> None:
    operation, twin, given = PAIRS[name]
    arguments = [on(device, each) for each in given]
    inputs = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
    found, expected = operation(*arguments), twin(*arguments)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weights = torch.linspace(0.5, 2.0, found.numel(), dtype=torch.float64, device=device)
    for own, other in zip(
        torch.autograd.grad(found, inputs, weights.view(found.shape)),
        torch.autograd.grad(expected, inputs, weights.view(found.shape)),
        strict=True,
    ):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


def heads(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values of two sequences, four heads and 64 numbers each; and gradients."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(2, 4, SEQ_LEN, 64, generator=generator) for _ in range(4)]
    return [each.to(device, dtype) for each in made]


def dense(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, allowed: Tensor) -> list[Tensor]:
    """Attention in double precision on a CPU: the output, and the gradients of its inputs."""
    wide = [each.double().cpu().requires_grad_() for each in (q, k, v)]
    out = F.scaled_dot_product_attention(*wide, attn_mask=allowed)
    return [out.detach(), *torch.autograd.grad(out, wide, grad.double().cpu())]


def held_to_dense(out: Tensor, inputs: list[Tensor], grad: Tensor, allowed: Tensor) -> None:
    found = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    q, k, v = (each.detach() for each in inputs)
    for one, other in zip(found, dense(q, k, v, grad, allowed), strict=True):
        # FlexAttention may multiply in TF32.
        torch.testing.assert_close(one.double().cpu(), other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [1, 100, 128, SEQ_LEN])
def test_flex_attention_inside_a_window_is_dense_attention(
    device: torch.device, window: int
) -> None:
    *given, grad = heads(device)
    inputs = [each.requires_grad_() for each in given]
    out = flex_attention(inputs[0], inputs[1], inputs[2], window)
    places = torch.arange(SEQ_LEN)
    ahead = places[:, None] - places
    held_to_dense(out, inputs, grad, (ahead >= 0) & (ahead < window))


@pytest.mark.parametrize("window", [None, 100])
def test_flex_attention_inside_documents_is_dense_attention(
    device: torch.device, window: int | None
) -> None:
    *given, grad = heads(device)
    inputs = [each.requires_grad_() for each in given]
    starts = torch.zeros(SEQ_LEN, 2, dtype=torch.int64)
    starts[130:, 0], starts[300:, 0], starts[77:, 1] = 130, 300, 77
    mask = Documents(starts.to(device)).block_mask(window)
    out = masked_flex_attention(inputs[0], inputs[1], inputs[2], mask)
    held_to_dense(out, inputs, grad, Documents(starts).mask(window))


# By what a model has: what the names of its attention's kernels contain, one of these.
FUSED = ("flash", "fmha", "cudnn")
FLEX = ("flex_attention", "triton_tem")
ATTENTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "full": ({}, FUSED),
    "grouped": ({"kv_heads": 2}, FUSED),
    "window": ({"window": 256}, FLEX),
    "alibi": ({"positions": "alibi"}, FLEX),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_runs_a_kernel_that_keeps_no_scores(device: torch.device, name: str) -> None:
    """Forward and backward, by the names of kernels and by the memory that a step takes."""
    given, wanted = ATTENTIONS[name]
    seq_len = 8192
    model = {"layers": 1, "seq_len": seq_len, "positions": "rope", **given}
    spec = job("bf16", **model)
    chunk = model_on(device, spec)
    tokens, targets = batch_on(device, spec, batch=1)
    # The first step compiles, and makes what stays.
    chunk(tokens, None, targets).backward()
    torch.cuda.synchronize(device)
    before_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with profile(activities=[ProfilerActivity.CUDA]) as forward:
        loss = chunk(tokens, None, targets)
        torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as backward:
        loss.backward()
        torch.cuda.synchronize(device)
    for recorded in (forward, backward):
        names = [event.key.lower() for event in recorded.key_averages()]
        assert any(part in kernel for part in wanted for kernel in names), names
    # One matrix of scores, of all heads.
    scores_bytes = spec.model.heads * seq_len**2 * 2
    assert torch.cuda.max_memory_allocated(device) - before_bytes < scores_bytes


@pytest.mark.parametrize("window", [None, 8], ids=["kernel", "masks"])
def test_a_ring_on_a_gpu_attends_as_whole_sequences_do(window: int | None) -> None:
    """Of pieces that are parts of larger tensors, of several heads and sequences."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad = (
        torch.randn(2, heads, 64, 16, generator=generator).to("cuda", torch.bfloat16)
        for heads in (4, 2, 2, 4)
    )
    assert flash.is_usable(q)
    comm = Comm(group=Group.CP, ranks=(0,), index=0)
    seen = Seen(pieces=(((0, 32), (32, 64)),), window=window)
    inputs = [each.clone().requires_grad_() for each in (q, k, v)]
    out = ring_attention(*inputs, comm, seen, None)
    out.backward(grad)
    wide = [each.double().cpu().requires_grad_() for each in (q, k, v)]
    places = torch.arange(64)
    ahead = places[:, None] - places
    mask = (ahead >= 0) & (ahead < (window or 64))
    expected = F.scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True)
    expected.backward(grad.double().cpu())
    found = [out.detach(), *(each.grad for each in inputs)]
    for one, other in zip(found, [expected.detach(), *(each.grad for each in wide)], strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=4e-2, atol=4e-2)
