"""One of two ranks over NCCL: its collectives, then an operation that its peer does not enter.

    python -m tests.gpu.nccl_rank RANK GPU FOLDER

Both meet at FOLDER/store. A rank leaves what its collectives gave in FOLDER/RANK.npz. Rank 0 then
gives an operation that waits for the other, aborts the group and uses its device again; rank 1
stays away until its standard input ends.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist

from outlast.blackbox import Group
from tests.trainer.jobs import Silent
from tests.trainer.jobs_tensor import collectives_of
from trainer.parallel.aborting import abort_backends, settle
from trainer.parallel.nccl import NcclComm
from trainer.parallel.timeline import timeline_of

VALUES = 1 << 20
# An all-reduce of so many values takes milliseconds where its peer enters it.
STUCK_S = 1.0


def group_of(device: torch.device, store: dist.Store, rank: int, size: int) -> NcclComm:
    """A group of NCCL on a device, as `trainer.parallel.mesh` makes it."""
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=60)
    return NcclComm(
        dist.ProcessGroupNCCL(store, rank, size, options),
        group=Group.DP,
        ranks=tuple(range(size)),
        index=rank,
        recorder=Silent(),
        timeline=timeline_of(device),
    )


def main(rank: int, gpu: int, folder: Path) -> None:
    device = torch.device("cuda", gpu)
    comm = group_of(device, dist.FileStore(str(folder / "store"), 2), rank, 2)
    np.savez(folder / f"{rank}.npz", **collectives_of(comm, device))
    # The host connects with the peer at the first operation of a kind, and would wait there.
    comm.all_reduce(torch.ones(VALUES, device=device))
    torch.cuda.synchronize(device)
    if rank == 0:
        abort_alone(comm, device)
    else:
        sys.stdin.read()
    # As a worker leaves: what torch takes down on the way out is not tested here.
    os._exit(0)


def abort_alone(comm: NcclComm, device: torch.device) -> None:
    """Abort an operation that would wait forever; the device must come to the end of its work."""
    stream = torch.cuda.current_stream(device)
    given = torch.ones(VALUES, device=device)
    torch.cuda.synchronize(device)
    # The stream waits for the operation, and the host for nothing.
    comm.start_all_reduce(given).wait()
    limit_s = time.monotonic() + STUCK_S
    while time.monotonic() < limit_s:
        assert not stream.query(), "the operation ended without its peer"
        time.sleep(0.05)
    abort_backends([comm.backend])
    settle("cuda")
    assert stream.query()
    assert float(torch.ones(VALUES, device=device).sum()) == VALUES
    # A group that takes its place.
    again = group_of(device, dist.HashStore(), 0, 1)
    assert float(again.all_reduce(torch.ones(VALUES, device=device)).sum()) == VALUES


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
