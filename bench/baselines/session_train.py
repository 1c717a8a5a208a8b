"""The script of `torchrun_train` with `outlast.session` in the place of its own checkpoints."""

from __future__ import annotations

import os
import time

STARTED_S = time.time()

import torch  # noqa: E402  # the moments around the import are part of what is measured
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from bench.baselines.dense import Training, note, read_spec  # noqa: E402
from outlast import session  # noqa: E402

IMPORTED_S = time.time()


def main() -> None:
    rank = int(os.environ["RANK"])
    note("started", rank=rank, at_s=STARTED_S)
    note("imported", rank=rank, at_s=IMPORTED_S)
    torch.set_num_threads(1)
    spec = read_spec()
    dist.init_process_group("gloo")
    note("groups", rank=rank)
    training = Training(spec)
    wrapped = DistributedDataParallel(training.model)
    note("model", rank=rank)
    checkpoint = session.checkpoint(model=training.model, optimizer=training.optimizer)
    first = checkpoint.restore()
    note("restored", rank=rank, step=first)
    for step in range(first + 1, spec.steps + 1):
        training.step(wrapped, step, rank, dist.get_world_size())
        session.step(step)
        note("step", rank=rank, step=step)
        checkpoint.save(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
