"""NCCL's groups and CUDA's processes, as far as one GPU shows them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist

from controller.agent.workers.environment import standby_environment
from controller.agent.workers.preload import preload_of_trainer
from diagnostics.checks import device as device_check
from tests.controller.processes import ROOT
from tests.diagnostics.test_checks import collect, context
from tests.gpu.nccl_rank import group_of
from tests.trainer.sums import check_collectives
from trainer.parallel.aborting import LIVES_ON, abort_backends, settle
from trainer.parallel.nccl import NcclComm
from trainer.worker.standby_options import ENTRY, PRELOADED_MODULES

DEADLINE_S = 120.0


def alone(device: torch.device) -> NcclComm:
    """A communicator of one."""
    return group_of(device, dist.HashStore(), 0, 1)


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


@pytest.mark.parametrize("own_gpu", [False, True], ids=["one GPU", "two GPUs"])
def test_two_ranks_reduce_and_one_aborts_what_the_other_does_not_enter(
    tmp_path: Path, own_gpu: bool
) -> None:
    if own_gpu and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, and there is one")
    program = [sys.executable, "-m", "tests.gpu.nccl_rank"]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(2):
            environment = {**os.environ, **LIVES_ON}
            if not own_gpu:
                # NCCL refuses ranks of one host that share a GPU, so these are on two, which meet
                # on loopback.
                environment |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
            gpu = rank if own_gpu else 0
            command = [*program, str(rank), str(gpu), str(tmp_path)]
            pipe = subprocess.PIPE
            ranks.append(subprocess.Popen(command, env=environment, stdin=pipe, cwd=ROOT))
        assert ranks[0].wait(DEADLINE_S) == 0
        found = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2)]
    finally:
        for process in ranks:
            # The peer of the aborted group has nothing more to say.
            process.kill()
            process.communicate()
    check_collectives(found)


def test_a_fork_of_the_standbys_imports_takes_hold_of_the_gpu() -> None:
    """What the standby process imports must not touch CUDA, which survives no fork."""
    preload = preload_of_trainer()
    entry = ENTRY.partition(":")[0]
    assert preload.modules, "the agent sees no GPU here"
    program = (
        "import importlib, os\n"
        f"for module in {(*PRELOADED_MODULES, entry, *preload.modules)}:\n"
        "    importlib.import_module(module)\n"
        "import torch\n"
        "from trainer.model import fused\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert len(os.listdir('/proc/self/task')) == 1\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    x = torch.ones(1024, device='cuda')\n"
        # A kernel that is compiled in the fork.
        "    out = fused.bias_activation(x, x, 'relu')\n"
        "    os._exit(0 if float(out.sum()) == 2048 else 1)\n"
        "_, status = os.waitpid(pid, 0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(status))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=standby_environment(preload.environment_of(os.environ), interface="lo"),
        cwd=ROOT,
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_devices_are_measured() -> None:
    found = collect(device_check.run, context(device="cuda", workers=1))
    assert found["compute.differing_elements"].value == 0
    assert found["memory.copy_bandwidth"].value > 0
