"""The same model and ranks under torchrun: DDP over gloo, a checkpoint on tmpfs every step.

Run by bench/recovery.py. Writes one JSON line per event to $EVENTS.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

STARTED_S = time.time()

import torch  # noqa: E402  # the moments around the import are part of what is measured
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from outlast.spec import JobSpec  # noqa: E402

IMPORTED_S = time.time()


def note(event: str, at_s: float | None = None, **facts: object) -> None:
    """Append one event; a single small write in append mode is atomic."""
    line = {"event": event, "at_s": at_s or time.time(), "pid": os.getpid(), "rank": RANK, **facts}
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
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gelu = torch.nn.functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
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


def main() -> None:
    note("started", STARTED_S)
    note("imported", IMPORTED_S)
    torch.set_num_threads(1)
    spec = JobSpec.model_validate_json(Path(os.environ["SPEC"]).read_text())
    dist.init_process_group("gloo")
    note("groups")
    torch.manual_seed(spec.seed)
    model = Gpt(spec)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), spec.optimizer.lr)
    note("model")
    checkpoint = Path(os.environ["CHECKPOINT"])
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    note("restored", step=step)
    batch = spec.data.global_batch // dist.get_world_size()
    while step < spec.steps:
        step += 1
        generator = torch.Generator().manual_seed(step * 1000 + RANK)
        shape = (batch, spec.model.seq_len + 1)
        tokens = torch.randint(0, spec.model.vocab_size, shape, generator=generator)
        logits = wrapped(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        note("step", step=step)
        if RANK == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    RANK = int(os.environ["RANK"])
    main()
