"""Where an agent may make cgroups, and what it writes there; `test_families` has the real thing."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from controller.agent.observe.oom import OomKills
from controller.agent.workers.cgroups import WorkerCgroups, kill_and_remove

VERSION_1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
VERSION_2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def machine(root: Path, mounts: str, *groups: str) -> Path:
    """The kernel's tables about the agent, below a folder."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(mounts)
    (root / "proc/self/cgroup").write_text("".join(f"{group}\n" for group in groups))
    return root


@pytest.mark.parametrize(
    ("mounts", "group", "file", "why"),
    [
        (VERSION_1, "4:memory:/a", "", "cgroup v2 is not mounted"),
        (VERSION_2, "0::/../../other", "", "cgroup v2 is not mounted"),
        # Not there, or a folder that nothing can be made in.
        (VERSION_2, "0::/gone", "", "/gone cannot be written to (No such file or directory)"),
        (VERSION_2, "0::/a", "sys/fs/cgroup/a", "/a cannot be written to (Not a directory)"),
        # A kernel before 5.14, or a file system that is none of the kernel's.
        (VERSION_2, "0::/a", "sys/fs/cgroup/a/cgroup.procs", "have no cgroup.kill"),
    ],
)
def test_without_the_right_or_the_kernel_workers_have_no_cgroup(
    tmp_path: Path, mounts: str, group: str, file: str, why: str
) -> None:
    root = machine(tmp_path, mounts, group)
    if file:
        (root / file).parent.mkdir(parents=True)
        (root / file).write_text("")
    before = sorted(root.rglob("*"))
    cgroups = WorkerCgroups(Path("/state"), root=root)
    assert why in cgroups.why_not
    assert cgroups.make() is None
    cgroups.close()
    assert sorted(root.rglob("*")) == before, "nothing is left of the try"


def test_a_group_is_killed_before_it_is_removed_and_tried_again_while_it_is_not_empty(
    tmp_path: Path,
) -> None:
    group = tmp_path / "outlast-x-1"
    group.mkdir()
    (group / "cgroup.kill").write_text("")
    # A file stands for a process that is stuck.
    assert not kill_and_remove(group)
    assert (group / "cgroup.kill").read_text() == "1"
    (group / "cgroup.kill").unlink()
    group.rmdir()
    assert kill_and_remove(group), "somebody else has removed it"


def test_a_group_is_not_gone_when_only_one_made_below_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "outlast-x-1"
    group.mkdir()
    own = group / "made by the worker"
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [folder, own])
    assert not kill_and_remove(group)
    assert group.exists()


def test_a_group_that_an_earlier_agent_left_takes_no_worker_s_cgroup(tmp_path: Path) -> None:
    root = machine(tmp_path, VERSION_2, "0::/a")
    above = root / "sys/fs/cgroup/a"
    prefix = f"outlast-{hashlib.sha256(b'/state').hexdigest()[:12]}"
    for name in ("cgroup.kill", "cgroup.procs"):
        (above / f"{prefix}-0").mkdir(parents=True, exist_ok=True)
        (above / f"{prefix}-0" / name).write_text("")
    # A file stands for a process that was killed and has not left yet.
    (above / f"{prefix}-1").mkdir()
    (above / f"{prefix}-1/process").write_text("")
    cgroups = WorkerCgroups(Path("/state"), root=root)
    assert cgroups.why_not == ""
    assert (above / f"{prefix}-1/cgroup.kill").read_text() == "1"
    assert cgroups.make() == above / f"{prefix}-2"


def test_kills_for_want_of_memory_stay_counted_above_a_worker_s_cgroup(tmp_path: Path) -> None:
    root = machine(tmp_path, VERSION_2, "0::/pod")
    counts = root / "sys/fs/cgroup/pod/memory.events"
    (counts.parent / "outlast-x-1").mkdir(parents=True)
    counts.write_text("oom_kill 2\n")
    (root / "proc/4711").mkdir()
    (root / "proc/4711/cgroup").write_text("0::/pod/outlast-x-1\n")
    kills = OomKills(root)
    kills.began("job/1/0", 4711)
    counts.write_text("oom_kill 3\n")
    told = kills.ended("job/1/0", was_killed=True)
    assert "(oom_kill of /sys/fs/cgroup/pod/memory.events is 3)" in told


def test_two_agents_of_one_machine_end_only_their_own_groups(tmp_path: Path) -> None:
    first, second = (WorkerCgroups(tmp_path / name) for name in ("one", "two"))
    if first.why_not:
        pytest.skip(f"cgroups of workers: {first.why_not}")
    one, two = first.make(), second.make()
    assert one is not None
    assert two is not None
    first.close()
    assert not one.exists()
    assert two.exists()
    asyncio.run(second.end(two))
    assert not two.exists()
