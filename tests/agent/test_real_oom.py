"""A worker that the kernel kills for want of memory, in a small cgroup made for it.

The node's own count rises too, which every agent on this machine tells: so this runs
alone, after the other tests.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.core.edge import reports
from outlast.ids import NodeId
from tests.agent.conftest import StartAgent
from tests.agent.harness import FakeController, start_job, wait_for

LIMIT_BYTES = 256 << 20


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup without room, in which nothing is left at the end."""
    root = Path("/sys/fs/cgroup")
    version_1 = (root / "memory/memory.limit_in_bytes").exists()
    group = (root / "memory" if version_1 else root) / f"outlast-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here ({error}); test_oom.py reads made-up ones")
    try:
        limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        names = limits if version_1 else ("memory.max", "memory.swap.max")
        if not (group / names[0]).exists():
            pytest.skip("cgroups have no memory controller here; test_oom.py reads made-up ones")
        (group / names[0]).write_text(str(LIMIT_BYTES))
        if (group / names[1]).exists():
            (group / names[1]).write_text(str(LIMIT_BYTES) if version_1 else "0")
        yield group
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()


def test_a_worker_that_eats_all_memory_is_told_from_one_that_is_killed(
    small_group: Path, controller: FakeController, start_agent: StartAgent
) -> None:
    agent = start_agent(controller.start())
    # Workers are forked from the standby process, and in its group.
    (small_group / "cgroup.procs").write_text(str(agent.standby_pid()))
    agent.behave(rank0=f"eat:{LIMIT_BYTES >> 19}")
    start_job(controller)
    eaten = controller.exit_of("job", 1, 0)
    # The other one has the same count, which has risen for the first one.
    os.kill(agent.worker_pid(1, 1), signal.SIGKILL)
    killed = controller.exit_of("job", 1, 1)
    told = [reports.worker_exited(NodeId("n0"), "job", 1, 0, exit_) for exit_ in (eaten, killed)]
    assert [exit_.code for exit_ in (eaten, killed)] == [-signal.SIGKILL] * 2
    assert [end.fault_class for end in told] == ["oom_host", "killed_by_signal"]
    assert "process of its cgroup" in told[0].detail
    assert str(small_group) in told[0].detail
