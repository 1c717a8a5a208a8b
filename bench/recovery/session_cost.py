"""What `outlast.session` costs a step: the call of `step`, and a save beside a copy of its bytes.

    python -m bench.recovery.session_cost FOLDER

Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
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
    pairs = []
    for number in range(_SAVES):
        copy_s = copies.copy()
        before_s = time.perf_counter()
        checkpoint.save(_STEPS + 2 + number)
        pairs.append((time.perf_counter() - before_s, copy_s))
    facts = {
        "step_us": 1e6 * step_s,
        "save_s": statistics.median(save_s for save_s, _ in pairs),
        "copy_s": statistics.median(copy_s for _, copy_s in pairs),
        "save_vs_copy": statistics.median(save_s / copy_s for save_s, copy_s in pairs),
        "state_bytes": sum(tensor.nbytes for tensor in tensors),
    }
    print(json.dumps(facts))


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
