"""The device of a rank, and what must be said to CUDA before it starts."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from trainer.parallel.aborting import LIVES_ON
from trainer.worker.assignment import Assignment

_DETERMINISTIC = "TORCHINDUCTOR_DETERMINISTIC"


def set_up_device(assignment: Assignment) -> torch.device:
    """The device that this rank computes on, current from now on."""
    if assignment.device != "cuda":
        return torch.device("cpu")
    spec = assignment.spec
    wanted = cuda_environment(
        bitwise=spec.determinism == "bitwise",
        pipelined=spec.parallel.pp > 1,
        lives_on=bool(assignment.agent_line),
    )
    for name, value in wanted.items():
        # Who runs the node may know better.
        os.environ.setdefault(name, value)
    compiler: Any = sys.modules.get("torch._inductor.config")
    if compiler is not None and hasattr(compiler, "deterministic"):
        # It was imported in the standby process, before the variable was set.
        compiler.deterministic = os.environ.get(_DETERMINISTIC) == "1"
    device = torch.device("cuda", assignment.local_rank)
    torch.cuda.set_device(device)
    return device


def cuda_environment(*, bitwise: bool, pipelined: bool, lives_on: bool) -> dict[str, str]:
    """Variables that CUDA, torch's compiler and its groups read once, when they are first used."""
    found = {
        # cuBLAS needs a workspace of its own to be reproducible.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Streams share 8 queues into the device by default, and work behind a
        # receive that spins would wait for its message (NVIDIA/nccl#783).
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    if pipelined:
        # To load a kernel at its first use may wait for the whole device, and so for a
        # receive that spins there (CUDA programming guide, "Lazy Loading"). Elsewhere all
        # ranks give their operations in one order, so that what runs always ends.
        found["CUDA_MODULE_LOADING"] = "EAGER"
    if bitwise:
        # Kernels chosen by measuring them may be others after a restart.
        found[_DETERMINISTIC] = "1"
    if lives_on:
        found |= LIVES_ON
    return found
