"""The whole model on one rank, without a process of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outlast.layout import Layout
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from tests.trainer.jobs import Silent
from trainer.model.gpt import GptChunk
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.worker.body import build_body

CPU = torch.device("cpu")


def lone_mesh(device: torch.device = CPU) -> Mesh:
    """A world of one."""
    return build_mesh(
        Layout(),
        0,
        store=None,
        device=device,
        timeout_s=5,
        recorder=Silent(),
        tied_embeddings=False,
    )


def job(precision: str, **model: Any) -> JobSpec:
    """A job of a small model with untied embeddings, but for what is given."""
    shape = {"layers": 2, "hidden": 256, "heads": 4, "seq_len": 256, "vocab_size": 512}
    document = {**shape, "tied_embeddings": False, **model}
    return parse_spec({"name": "alone", "precision": precision, "model": document})


def model_on(device: torch.device, spec: JobSpec) -> GptChunk:
    """The model that the job begins with."""
    body = build_body(spec, lone_mesh(device))
    body.flat.initialise(spec.seed)
    (chunk,) = body.chunks
    return chunk


def batch_on(device: torch.device, spec: JobSpec, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens of some sequences and what comes behind each, [S, B]."""
    size = (spec.model.seq_len + 1, batch)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(spec.model.vocab_size, size, generator=generator).to(device)
    return tokens[:-1], tokens[1:]


def loss_and_gradients(
    device: torch.device, spec: JobSpec, *, scale: float = 1.0
) -> tuple[float, dict[str, Tensor]]:
    """The mean loss of a batch and the gradients of it, in double precision on the CPU.

    `scale` is what the loss is multiplied with on the way, as in fp16.
    """
    chunk = model_on(device, spec)
    tokens_SB, targets_SB = batch_on(device, spec)
    chunk.begin(1, 0)
    loss = chunk(tokens_SB, None, targets_SB)
    (loss * (scale / targets_SB.numel())).backward()
    found = {}
    for name, parameter in chunk.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.double().cpu() / scale
    return loss.item() / targets_SB.numel(), found
