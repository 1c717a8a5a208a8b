"""Ending what a device has under way with others, in a process that lives on.

What does not belong here: which groups there are, and when they are given up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

# Variables that torch's groups read when they are made. An operation that fails, as its peer is
# gone, is aborted by this process when it leaves: torch's own threads would end it before, or call
# what they see then an error.
LIVES_ON: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # They would wait for a minute, once they know of a failure, for records to be written.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # Multicast memory of NVLink's switches does not survive an abort (known to those who restart
    # inside of processes, nvidia-resiliency-ext).
    "NCCL_NVLS_ENABLE": "0",
}


def abort_backends(backends: Collection[Any]) -> None:
    """Abort NCCL's groups, torch's `ProcessGroupNCCL`; they are of no use then.

    What is under way ends with whatever its tensors hold by then. All communicators are aborted at
    once, each by a thread: one that is aborted before another may wait for the kernels of that one
    (pytorch/pytorch#119797), and torch aborts in threads of its own, outside of any group of calls.

    Raises:
        RuntimeError: NCCL cannot.
    """
    if not backends:
        return
    with ThreadPoolExecutor(len(backends), thread_name_prefix="abort") as threads:
        aborted = [threads.submit(backend.abort) for backend in backends]
    for each in aborted:
        each.result()


def settle(device: str) -> None:
    """Return once the device of this process has nothing under way.

    Raises:
        RuntimeError: it is of no use to this process any more, which must be made anew.
    """
    # torch's stubs leave this function untyped.
    if device == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
