"""What `outlast.session` costs a step: the call of `step`, and a save beside a copy of its bytes.

    python -m bench.recovery.session_cost FOLDER

Prints one line of JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.baselines.plain import WarmCopy
from outlast import session
from outlast.spec.parse import parse_spec
from outlast.worker_contract import SESSION_FILE, WorkerContract, WorkerFiles

_STEPS = 2_000
_SAVES = 15


def main() -> None:
    folder = Path(sys.argv[1])
    _begin(folder)
    began_s = time.perf_counter()
    for number in range(1, _STEPS + 1):
        session.step(number, loss=1.0, tokens=1024)
    step_s = (time.perf_counter() - began_s) / _STEPS
    # 64 layers of 8 tensors, 256 MB, with moments three times as much.
    model = torch.nn.ModuleList(torch.nn.Linear(1000, 1000) for _ in range(64))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    checkpoint = session.checkpoint(model=model, optimizer=optimizer)
    tensors = [*model.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    copies = WarmCopy(tensors)
    checkpoint.save(_STEPS + 1)
    steps = itertools.count(_STEPS + 2)

    def saved_and_copied() -> tuple[float, float]:
        copy_s = copies.copy()
        before_s = time.perf_counter()
        checkpoint.save(next(steps))
        return time.perf_counter() - before_s, copy_s

    threads = torch.get_num_threads()
    pairs = [saved_and_copied() for _ in range(_SAVES)]
    # What torchrun gives each of several ranks.
    torch.set_num_threads(1)
    pairs_alone = [saved_and_copied() for _ in range(_SAVES)]
    facts = {
        "step_us": 1e6 * step_s,
        "threads": threads,
        "save_s": statistics.median(save_s for save_s, _ in pairs),
        "copy_s": statistics.median(copy_s for _, copy_s in pairs),
        "save_vs_copy": _ratio(pairs),
        "save_vs_copy_one_thread": _ratio(pairs_alone),
        "state_bytes": sum(tensor.nbytes for tensor in tensors),
    }
    print(json.dumps(facts))


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(save_s / copy_s for save_s, copy_s in pairs)


def _begin(folder: Path) -> None:
    """Be the only rank of a job."""
    files = WorkerFiles.below(folder, 0)
    spec = parse_spec({"name": "cost", "workload": {"command": ["python", "-m", "cost"]}})
    contract = WorkerContract(
        job_id="cost",
        attempt=1,
        rank=0,
        world_size=1,
        local_rank=0,
        rank_nodes=("here",),
        spec_json=spec.canonical_json(),
        rendezvous_host="127.0.0.1",
        rendezvous_port=1,
        rendezvous_fd=None,
        log_path=files.log,
        error_path=files.error,
        blackbox_path=files.blackbox,
        environment_path=files.environment,
        memory_dir=folder / "memory" / "rank-00000",
        data_dir=folder,
        committed_step=0,
        skipped=(),
        replayed_step=0,
        suspects=(),
        chosen=(),
        checkpoint_url=f"file://{folder}/store",
        forked_at_ns=0,
        device="cpu",
    )
    files.session.write_text(json.dumps(contract.to_env()))
    os.environ[SESSION_FILE] = str(files.session)


if __name__ == "__main__":
    main()
