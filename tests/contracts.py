"""Contracts between an agent and its workers, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outlast.worker_contract import WorkerContract, WorkerFiles


def contract_of(
    folder: Path, rank: int = 0, *, world_size: int = 2, attempt: int = 1, **changes: Any
) -> WorkerContract:
    """The part of a rank whose files are in `folder`; `changes` are fields of it."""
    files = WorkerFiles.below(folder, rank)
    fields: Mapping[str, Any] = {
        "job_id": "job-1",
        "attempt": attempt,
        "rank": rank,
        "world_size": world_size,
        "local_rank": rank,
        "rank_nodes": ("n1",) * world_size,
        "spec_json": "{}",
        "rendezvous_host": "127.0.0.1",
        "rendezvous_port": 1,
        "rendezvous_fd": None,
        "log_path": files.log,
        "error_path": files.error,
        "blackbox_path": files.blackbox,
        "environment_path": files.environment,
        "memory_dir": folder / "memory" / "job-1" / files.log.stem,
        "data_dir": folder / "data",
        "committed_step": 0,
        "skipped": (),
        "replayed_step": 0,
        "suspects": (),
        "chosen": (),
        "checkpoint_url": "",
        "forked_at_ns": 0,
        "device": "cpu",
    }
    return WorkerContract(**{**fields, **changes})
