"""Whose count says that a worker was killed for want of memory, on made-up machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from controller.agent.observe.oom import OomKills

PID = 4711
VERSION_1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
VERSION_2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


class Machine:
    """The tables of a kernel, below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now_s = 100.0
        self.kills = OomKills(root, lambda: self.now_s)
        self.mount()
        self.says("proc/vmstat", "oom_kill 3\n")

    def says(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.fsencode(text))

    def mount(self, *lines: str) -> None:
        self.says("proc/self/mountinfo", "".join(f"{line}\n" for line in lines))

    def begins(self, *cgroup: str) -> None:
        self.says(f"proc/{PID}/cgroup", "".join(f"{line}\n" for line in cgroup))
        self.kills.began("job/1/0", PID)
        self.now_s += 1.0

    def is_killed(self) -> str:
        return self.kills.ended("job/1/0", was_killed=True)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("mount", "top", "cgroup", "file", "text"),
    [
        # A service of systemd, beside hierarchies of other controllers.
        (VERSION_2, "/", "0::/a.slice/b", "sys/fs/cgroup/a.slice/b/memory.events", "max 7\n"),
        # A container with a namespace of its own.
        (VERSION_2, "/", "0::/", "sys/fs/cgroup/memory.events", "low 0\n"),
        # A group whose memory is accounted to the one above.
        (VERSION_2, "/", "0::/a/b/c", "sys/fs/cgroup/a/memory.events", ""),
        (VERSION_1, "/", "4:memory:/a/b", "sys/fs/cgroup/memory/a/b/memory.oom_control", ""),
        # A container that sees its own part of the machine's hierarchy only.
        (
            VERSION_1,
            "/docker/x",
            "4:cpu,memory:/docker/x/y",
            "sys/fs/cgroup/memory/y/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\n",
        ),
    ],
)
def test_a_rise_in_the_worker_s_own_cgroup_explains_its_end(
    machine: Machine, mount: str, top: str, cgroup: str, file: str, text: str
) -> None:
    machine.mount("1 0 0:1 / / rw - overlay  rw", mount.format(top=top))
    machine.says(file, f"{text}oom_kill 3\n")
    machine.begins("9:name=systemd:/", cgroup)
    machine.says(file, f"{text}oom_kill 4\n")
    assert machine.is_killed() == (
        "for want of memory the kernel has killed one more process of its cgroup "
        f"(oom_kill of /{file} is 4)"
    )


def test_a_rise_elsewhere_on_the_node_is_not_the_worker_s(machine: Machine) -> None:
    machine.mount(VERSION_2.format(top="/"))
    machine.says("sys/fs/cgroup/a/memory.events", "oom_kill 0\n")
    machine.begins("0::/a")
    machine.says("proc/vmstat", "oom_kill 4\n")
    assert machine.is_killed() == ""


@pytest.mark.parametrize("cgroup", ["0::/a", "0::/../other", "4:memory:/a"])
def test_where_no_cgroup_counts_the_words_say_that_it_may_be_another_s(
    machine: Machine, cgroup: str
) -> None:
    machine.mount(VERSION_2.format(top="/"))
    machine.begins(cgroup)
    machine.says("proc/vmstat", "nr_free_pages 2\noom_kill 4\n")
    assert machine.is_killed() == (
        "for want of memory the kernel has killed one more process of this node, perhaps another "
        "one: its cgroup has no count (oom_kill of /proc/vmstat is 4)"
    )


@pytest.mark.parametrize(
    ("name", "printed"), [("b\udcfc", "b\ufffd"), ("b\u2028", "b\u2028"), ("b\x85", "b\x85")]
)
def test_mounts_and_groups_may_be_named_in_any_bytes(
    machine: Machine, name: str, printed: str
) -> None:
    machine.mount(f"40 23 8:1 / /mnt/{name} rw - ext4 /dev/sda1 rw", VERSION_2.format(top="/"))
    machine.says(f"sys/fs/cgroup/{name}/memory.events", "oom_kill 3\n")
    machine.begins(f"0::/{name}/c")
    machine.says(f"sys/fs/cgroup/{name}/memory.events", "oom_kill 4\n")
    assert f"oom_kill of /sys/fs/cgroup/{printed}/memory.events is 4" in machine.is_killed()


def test_a_worker_outside_the_agent_s_group_is_not_counted_with_the_agent(machine: Machine) -> None:
    machine.mount(VERSION_2.format(top="/a"))
    machine.says("proc/self/cgroup", "0::/a\n")
    machine.says("sys/fs/cgroup/memory.events", "oom_kill 3\n")
    machine.begins("0::/elsewhere")
    machine.says("sys/fs/cgroup/memory.events", "oom_kill 4\n")
    assert machine.is_killed() == ""


def test_a_kernel_without_any_count_explains_nothing(machine: Machine) -> None:
    machine.says("proc/vmstat", "nr_free_pages 2\n")
    machine.begins("0::/")
    assert machine.is_killed() == ""


def test_a_worker_that_somebody_killed_is_not_out_of_memory(machine: Machine) -> None:
    machine.begins("0::/")
    assert machine.is_killed() == ""


def test_an_end_that_was_no_kill_of_others_is_not_asked_about(machine: Machine) -> None:
    machine.begins("0::/")
    machine.says("proc/vmstat", "oom_kill 4\n")
    assert machine.kills.ended("job/1/0", was_killed=False) == ""
    assert machine.is_killed() == ""


def test_a_process_killed_long_before_is_another_one(machine: Machine) -> None:
    """A loader, say; somebody kills the worker later."""
    machine.begins("0::/")
    machine.says("proc/vmstat", "oom_kill 4\n")
    machine.kills.look()
    machine.now_s += 3600.0
    assert machine.is_killed() == ""


def test_what_was_killed_before_the_worker_began_is_another_one(machine: Machine) -> None:
    machine.begins("0::/")
    machine.kills.ended("job/1/0", was_killed=False)
    machine.says("proc/vmstat", "oom_kill 4\n")
    machine.begins("0::/")
    assert machine.is_killed() == ""
