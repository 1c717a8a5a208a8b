"""The model of `bench.gpu_single` in plain torch, for one device: its modules and AdamW.

What is multiplied is in the precision of the job, with fp32 weights for the optimizer, as ours has
it. It uses what torch ships for one device: SDPA, fused AdamW and, if asked, torch.compile on
everything between tokens and loss. Parameters have the names and layouts of ours.
"""

# B batch, S sequence, H heads, R rows of a head, C head width, D model width.
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outlast.spec import JobSpec

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class _Input(nn.Linear):
    """A norm, and one projection for attention and MLP."""

    def __init__(self, spec: JobSpec, features: int) -> None:
        super().__init__(spec.model.hidden, features, bias=False)
        self.norm = nn.LayerNorm(spec.model.hidden, eps=spec.model.norm_eps)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return super().forward(self.norm(x_BSD))


class _Block(nn.Module):
    """A parallel block: attention and MLP read the same norm and are projected back together."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__()
        model = spec.model
        self.heads = model.heads
        self.rows = (*[model.hidden // model.heads] * 3, model.mlp_hidden // model.heads)
        self.input = _Input(spec, sum(self.rows) * model.heads)
        self.output = nn.Linear(model.hidden + model.mlp_hidden, model.hidden, bias=False)

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
        rows_BSHR = self.input(x_BSD).unflatten(-1, (self.heads, -1))
        query, key, value, units = rows_BSHR.split(self.rows, dim=-1)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        query, key = _turned(query, cos_SC, sin_SC), _turned(key, cos_SC, sin_SC)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        inner = torch.cat((mixed.transpose(1, 2), F.gelu(units, approximate="tanh")), dim=-1)
        out: Tensor = x_BSD + self.output(inner.flatten(2))
        return out


def _turned(x_BHSC: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864), of pairs i and i + width / 2."""
    first, second = x_BHSC.chunk(2, dim=-1)
    return x_BHSC * cos_SC + torch.cat((-second, first), dim=-1) * sin_SC


class PlainGpt(nn.Module):
    """The summed loss of some tokens, [B, S], and what comes behind each."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__()
        model = spec.model
        self.tokens = nn.Embedding(model.vocab_size, model.hidden)
        self.blocks = nn.ModuleDict({str(layer): _Block(spec) for layer in range(model.layers)})
        self.norm = nn.LayerNorm(model.hidden, eps=model.norm_eps)
        self.head = nn.Linear(model.hidden, model.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=model.init_std)
        width = model.hidden // model.heads
        frequencies = model.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.outer(torch.arange(model.seq_len, dtype=torch.float64), frequencies)
        self.register_buffer("cos_SC", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin_SC", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        x_BSD = self.tokens(tokens_BS)
        for block in self.blocks.values():
            x_BSD = block(x_BSD, self.cos_SC, self.sin_SC)
        logits = self.head(self.norm(x_BSD)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets_BS.flatten(), reduction="sum")


class Plain:
    """Training on one device; `step` trains on one global batch."""

    def __init__(self, spec: JobSpec, *, device: torch.device, compiled: bool) -> None:
        torch.manual_seed(spec.seed)
        self._spec = spec
        self._device = device
        with device:
            whole = PlainGpt(spec)
        self._masters = [parameter.detach().clone() for parameter in whole.parameters()]
        self.model = whole.to(DTYPES[spec.precision])
        self._parameters: list[Tensor] = list(self.model.parameters())
        self.num_parameters = sum(each.numel() for each in self._masters)
        self._loss: Callable[[Tensor, Tensor], Tensor] = (
            torch.compile(self.model) if compiled else self.model
        )
        given = spec.optimizer
        matrices = [each for each in self._masters if each.ndim > 1]
        vectors = [each for each in self._masters if each.ndim == 1]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": given.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=given.lr,
            betas=(given.beta1, given.beta2),
            eps=given.eps,
            fused=True,
        )
        self._sums = [torch.zeros_like(each) for each in self._masters]
        for master, own in zip(self._masters, self._sums, strict=True):
            master.grad = own

    def step(self, number: int) -> float:
        """Forward, backward and update on batch `number`; the mean loss of its tokens.

        It returns when the device is done.
        """
        spec = self._spec
        share = 1.0 / (spec.data.global_batch * spec.model.seq_len)
        torch._foreach_zero_(self._sums)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for tokens_BS, targets_BS in self._micro_batches(number):
            loss = self._loss(tokens_BS, targets_BS) * share
            loss.backward()
            total += loss.detach()
            # Sums of micro-batches in fp32, as ours are.
            found = [each.grad for each in self._parameters if each.grad is not None]
            torch._foreach_add_(self._sums, found)
            self.model.zero_grad(set_to_none=True)
        self._update()
        return float(total)

    @torch.no_grad()
    def _update(self) -> None:
        norm = self._spec.optimizer.clip_grad_norm
        if norm is not None:
            nn.utils.clip_grad_norm_(self._masters, norm)
        self._optimizer.step()
        torch._foreach_copy_(self._parameters, self._masters)

    def _micro_batches(self, number: int) -> list[tuple[Tensor, Tensor]]:
        spec = self._spec
        generator = torch.Generator().manual_seed(number)
        size = (spec.data.global_batch, spec.model.seq_len + 1)
        rows = torch.randint(0, min(256, spec.model.vocab_size), size, generator=generator)
        parts = rows.to(self._device).split(spec.parallel.micro_batch)
        return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]
