"""NCCL's groups and CUDA's processes, as far as one GPU shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import torch
from torch import distributed as dist

from diagnostics.checks import device as device_check
from outlast.blackbox import Group
from outlast.session.agreement import Unrecorded
from tests.diagnostics.test_checks import collect, context
from trainer.parallel.aborting import abort_backends, settle
from trainer.parallel.nccl import NcclComm
from trainer.parallel.timeline import timeline_of

DEADLINE_S = 120.0


def alone(device: torch.device) -> NcclComm:
    """A communicator of one."""
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=60)
    backend = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
    return NcclComm(
        backend,
        group=Group.DP,
        ranks=(0,),
        index=0,
        recorder=Unrecorded(),
        timeline=timeline_of(device),
    )


def test_what_a_communicator_of_one_computes_is_what_it_was_given(device: torch.device) -> None:
    comm = alone(device)
    given = torch.arange(12.0, device=device).view(4, 3)
    assert torch.equal(comm.all_reduce(given.clone()), given)
    assert torch.equal(comm.all_reduce_max(given.clone()), given)
    assert torch.equal(comm.all_gather(given), given)
    assert torch.equal(comm.reduce_scatter(given), given)
    assert torch.equal(comm.broadcast(given.clone()), given)
    out = torch.empty_like(given)
    comm.start_reduce_scatter(given, out, wire_dtype=torch.float32).wait()
    assert torch.equal(out, given)


def test_a_communicator_that_was_aborted_leaves_the_device_usable(device: torch.device) -> None:
    comm = alone(device)
    given = torch.ones(1 << 20, device=device)
    comm.all_reduce(given)
    abort_backends([comm.backend])
    settle("cuda")
    assert float(given.sum()) == given.numel()
    # A new one takes its place.
    assert torch.equal(alone(device).all_reduce(given.clone()), given)


def test_a_fork_of_the_standbys_imports_takes_hold_of_the_gpu() -> None:
    """What the standby process imports must not touch CUDA, which survives no fork."""
    program = (
        "import os, torch\n"
        "import trainer.worker.process, torch._dynamo\n"
        "assert not torch.cuda.is_initialized()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    x = torch.ones(1024, device='cuda')\n"
        "    os._exit(0 if float(x.sum()) == 1024 else 1)\n"
        "_, status = os.waitpid(pid, 0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(status))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=os.environ, timeout=DEADLINE_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_devices_are_measured() -> None:
    found = collect(device_check.run, context(device="cuda", workers=1))
    assert found["compute.differing_elements"].value == 0
    assert found["memory.copy_bandwidth"].value > 0
