"""The dense twin of our model with its data and loop, as scripts for other launchers have them.

Such a script is told where to write its events ($EVENTS), what to train ($SPEC) and where
its checkpoint lies ($CHECKPOINT, on tmpfs).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from outlast.spec import JobSpec


def read_spec() -> JobSpec:
    """The job to train."""
    return JobSpec.model_validate_json(Path(os.environ["SPEC"]).read_text())


def note(event: str, *, rank: int, at_s: float | None = None, **facts: object) -> None:
    """Append one event; a single small write in append mode is atomic."""
    line = {"event": event, "at_s": at_s or time.time(), "pid": os.getpid(), "rank": rank, **facts}
    handle = os.open(os.environ["EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, (json.dumps(line) + "\n").encode())
    os.close(handle)


class Block(torch.nn.Module):
    """A pre-LayerNorm block of the same shape as ours."""

    def __init__(self, hidden: int, heads: int, mlp_hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = torch.nn.LayerNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.out = torch.nn.Linear(hidden, hidden)
        self.mlp_norm = torch.nn.LayerNorm(hidden)
        self.up = torch.nn.Linear(hidden, mlp_hidden)
        self.down = torch.nn.Linear(mlp_hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, self.heads, 3, -1)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gelu = functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + self.down(gelu)


class Gpt(torch.nn.Module):
    """The dense twin of `trainer.model.gpt`, tied embeddings included."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__()
        model = spec.model
        self.tokens = torch.nn.Embedding(model.vocab_size, model.hidden)
        self.positions = torch.nn.Embedding(model.seq_len, model.hidden)
        self.blocks = torch.nn.ModuleList(
            Block(model.hidden, model.heads, model.mlp_hidden) for _ in range(model.layers)
        )
        self.norm = torch.nn.LayerNorm(model.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


class Training:
    """A model, its optimizer and its checkpoint."""

    def __init__(self, spec: JobSpec) -> None:
        torch.manual_seed(spec.seed)
        self._spec = spec
        self.model = Gpt(spec)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), spec.optimizer.lr)
        self._checkpoint = Path(os.environ["CHECKPOINT"])

    def load(self) -> int:
        """Take up the newest checkpoint; returns its step, 0 without one."""
        if not self._checkpoint.exists():
            return 0
        saved = torch.load(self._checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        return int(saved["step"])

    def save(self, step: int) -> None:
        """Replace the checkpoint as a whole."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": step,
        }
        draft = self._checkpoint.with_suffix(".tmp")
        torch.save(state, draft)
        draft.replace(self._checkpoint)

    def step(
        self, wrapped: Callable[[torch.Tensor], torch.Tensor], step: int, rank: int, world_size: int
    ) -> None:
        """One step of `wrapped`, which is the model with its gradients averaged."""
        spec = self._spec
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        shape = (spec.data.global_batch // world_size, spec.model.seq_len + 1)
        tokens = torch.randint(0, spec.model.vocab_size, shape, generator=generator)
        logits = wrapped(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
