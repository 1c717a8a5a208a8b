"""Cross entropy straight from hidden states, with the vocabulary split over the group.

Tokens go in chunks: logits, loss and gradients of one chunk are computed before
the next one's, so logits of all tokens never exist. Gradients are those of the
summed loss and are computed with it; the backward pass only multiplies them by
the gradient of that sum. That saves the second projection which recomputing the
logits would cost, for one gradient of the head weight that is kept between the
forward and the backward pass of a micro-batch.

A token needs three numbers of each rank (largest logit, normaliser, the
target's logit), which travel in one message per chunk.
"""

# S sequence, B micro-batch, D model width, V vocabulary, N tokens of a chunk, T ranks.
# Capitals are logical sizes; a rank's shard may be smaller.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from trainer.core.loss_chunks import loss_chunk_tokens
from trainer.parallel.comm import Comm
from trainer.parallel.tensor import TensorParallel, own_rows


def vocab_loss(
    hidden_SBD: Tensor,
    weight_VD: Tensor,
    targets_SB: Tensor,
    tp: TensorParallel,
    *,
    bias_V: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    vocab_size: int | None = None,
    max_logits: int | None = None,
) -> Tensor:
    """The summed loss of all tokens whose target is 0 or more.

    Logits are logit_scale * (hidden @ weight^T + bias).

    `hidden_SBD` is the shard of the sequence under sequence parallelism, `targets_SB`
    always the whole. With `logit_softcap` c they are c tanh(logits / c). Rows of the weight
    beyond `vocab_size` are padding, whose probability is 0; None: there are none. No more than
    `max_logits` logits, but those of one token, exist at a time on a rank; None leaves it to
    the device. In 16-bit types softmax, loss and sums are fp32.
    """
    num_rows = weight_VD.shape[0]
    options = _Options(
        tp=tp,
        logit_scale=logit_scale,
        softcap=logit_softcap,
        own_vocab=num_rows
        if vocab_size is None
        else min(num_rows, max(0, vocab_size - tp.comm.index * num_rows)),
        chunk_tokens=loss_chunk_tokens(num_rows, on_gpu=weight_VD.is_cuda)
        if max_logits is None
        else max(1, max_logits // num_rows),
        differentiated=torch.is_grad_enabled(),
    )
    arguments = (hidden_SBD, weight_VD, bias_V, targets_SB, options)
    loss: Tensor = _VocabLoss.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    tp: TensorParallel
    logit_scale: float
    softcap: float | None
    own_vocab: int
    """Rows of this rank that are no padding."""
    chunk_tokens: int
    differentiated: bool


class _VocabLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SBD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_SB: Tensor,
        options: _Options,
    ) -> Tensor:
        tp = options.tp
        full_SBD = tp.comm.all_gather(hidden_SBD) if tp.sequence_parallel else hidden_SBD
        head = _Head(weight_VD, bias_V, options)
        loss = torch.zeros((), dtype=head.sum_dtype, device=hidden_SBD.device)
        grad_SBD = torch.empty_like(full_SBD) if options.differentiated else None
        rows = (full_SBD.flatten(0, 1), targets_SB.flatten(), _rows_or_none(grad_SBD))
        for start in range(0, targets_SB.numel(), options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            x_ND, targets_N, grad_ND = (None if part is None else part[chunk] for part in rows)
            assert x_ND is not None
            assert targets_N is not None
            loss += head.chunk_loss(x_ND, targets_N, grad_ND)
        if grad_SBD is not None:
            shard = tp.comm.reduce_scatter if tp.sequence_parallel else tp.comm.all_reduce
            ctx.save_for_backward(shard(grad_SBD), head.weight_grad, head.bias_grad)
            ctx.dtype = hidden_SBD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The scale of a loss may not be finite in a 16-bit type, and sums may be too large for it.
        of_hidden, of_weight, of_bias = (
            None if saved is None else (saved.to(grad.dtype) * grad).to(ctx.dtype)
            for saved in ctx.saved_tensors
        )
        return of_hidden, of_weight, of_bias, None, None


class _Head:
    """The output projection, and its gradients as they add up over chunks, in `sum_dtype`."""

    def __init__(self, weight_VD: Tensor, bias_V: Tensor | None, options: _Options) -> None:
        self._weight, self._bias = weight_VD, bias_V
        self._scale, self._comm = options.logit_scale, options.tp.comm
        self._own_vocab, self._softcap = options.own_vocab, options.softcap
        self.sum_dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        differentiated = [
            tensor if options.differentiated else None for tensor in (weight_VD, bias_V)
        ]
        self.weight_grad, self.bias_grad = (
            None if tensor is None else torch.zeros_like(tensor, dtype=self.sum_dtype)
            for tensor in differentiated
        )

    def chunk_loss(self, x_ND: Tensor, targets_N: Tensor, grad_ND: Tensor | None) -> Tensor:
        """The summed loss of some tokens; fills their gradient if there is one to fill."""
        logits_NV = F.linear(x_ND, self._weight, self._bias).to(self.sum_dtype)
        if self._scale != 1.0:
            logits_NV *= self._scale
        # Not minus infinity: a rank that has nothing but padding would subtract it from itself.
        slope_NV = None
        if self._softcap is not None:
            bounded_NV = torch.tanh(logits_NV / self._softcap)
            slope_NV = 1.0 - bounded_NV.square() if grad_ND is not None else None
            logits_NV = bounded_NV * self._softcap
        if self._own_vocab < logits_NV.shape[1]:
            logits_NV[:, self._own_vocab :] = torch.finfo(self.sum_dtype).min
        counted_N = targets_N >= 0
        rows_N, inside_N = own_rows(targets_N, logits_NV.shape[1], self._comm)
        picked_N = logits_NV.gather(1, rows_N.unsqueeze(1)).squeeze(1) * inside_N
        largest_N = logits_NV.amax(dim=1)
        exp_NV = logits_NV.sub_(largest_N.unsqueeze(1)).exp_()
        own_3N = torch.stack((largest_N, exp_NV.sum(dim=1), picked_N))
        log_total_N, picked_N = _over_ranks(own_3N, self._comm)
        if grad_ND is not None:
            factor_N = (largest_N - log_total_N).exp() * counted_N
            probability_NV = exp_NV.mul_(factor_N.unsqueeze(1))
            tokens_N = torch.arange(len(rows_N), device=rows_N.device)
            probability_NV[tokens_N, rows_N] -= inside_N.to(self.sum_dtype)
            if slope_NV is not None:
                probability_NV *= slope_NV
            self._differentiate(x_ND, probability_NV, grad_ND)
        return ((log_total_N - picked_N) * counted_N).sum()

    def _differentiate(self, x_ND: Tensor, of_logits_NV: Tensor, grad_ND: Tensor) -> None:
        if self._scale != 1.0:
            of_logits_NV *= self._scale
        if self.bias_grad is not None:
            self.bias_grad += of_logits_NV.sum(dim=0)
        grad_NV = of_logits_NV.to(x_ND.dtype)
        torch.mm(grad_NV, self._weight, out=grad_ND)
        assert self.weight_grad is not None
        if x_ND.is_cuda and self.sum_dtype != x_ND.dtype:
            # Factors of 16 bits are fast there; their sum over tokens may not fit into as many.
            self.weight_grad += torch.mm(grad_NV.t(), x_ND, out_dtype=self.sum_dtype)
        else:
            self.weight_grad.addmm_(of_logits_NV.t(), x_ND.to(self.sum_dtype))


def _over_ranks(own_3N: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials, and the target's logit, over the whole vocabulary."""
    largest_TN, sums_TN, picked_TN = comm.all_gather(own_3N.unsqueeze(0)).unbind(dim=1)
    largest_N = largest_TN.amax(dim=0)
    total_N = (sums_TN * (largest_TN - largest_N).exp()).sum(dim=0)
    return largest_N + total_N.log(), picked_TN.sum(dim=0)


def _rows_or_none(tensor_SBD: Tensor | None) -> Tensor | None:
    return None if tensor_SBD is None else tensor_SBD.view(-1, tensor_SBD.shape[-1])
