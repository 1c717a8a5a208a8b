"""What an agent says that its node has."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.memory import free_memory_bytes, memory_bytes, most_host_memory_bytes
from controller.agent.config import AgentConfig
from controller.agent.observe.capacity import NodeCapacity, count_gpus
from controller.agent.workers.launch import StartRefusedError, check_host_memory
from outlast.failures import ErrorKind
from outlast.spec.parse import parse_spec
from outlast.v1 import agents_pb2

GIB = 1 << 30


def machine(root: Path, *, groups: str = "0::/\n", limits: dict[str, str] | None = None) -> Path:
    """A machine of 16 GiB as /proc and /sys show it."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for path, text in (limits or {}).items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {}, 16 * GIB),
        ("0::/pod/agent\n", {"pod/agent/memory.max": "max\n"}, 16 * GIB),
        # The pod's limit holds for the container in it.
        (
            "0::/pod/agent\n",
            {"pod/agent/memory.max": "max\n", "pod/memory.max": f"{4 * GIB}\n"},
            4 * GIB,
        ),
        # A container sees its own group at the root of the mount.
        ("0::/kubepods/pod1\n", {"memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        (
            "4:memory:/docker/1\n0::/\n",
            {"memory/docker/1/memory.limit_in_bytes": f"{3 * GIB}\n"},
            3 * GIB,
        ),
        (
            "4:memory:/docker/1\n",
            {"memory/docker/1/memory.limit_in_bytes": "9223372036854771712\n"},
            16 * GIB,
        ),
    ],
    ids=["none", "max", "parent", "container", "version 1", "version 1 without"],
)
def test_memory_is_the_machines_or_less_by_a_cgroup(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    assert memory_bytes(machine(tmp_path, groups=groups, limits=limits)) == expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, 8 * GIB),
        (
            "0::/pod\n",
            {
                "pod/memory.max": f"{4 * GIB}\n",
                "pod/memory.current": f"{3 * GIB}\n",
                "pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        (
            "4:memory:/docker/1\n",
            {
                "memory/docker/1/memory.limit_in_bytes": f"{2 * GIB}\n",
                "memory/docker/1/memory.usage_in_bytes": f"{3 * GIB}\n",
            },
            0,
        ),
    ],
    ids=["none", "version 2", "version 1, over its limit"],
)
def test_free_memory_is_what_the_container_has_left(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    root = machine(tmp_path, groups=groups, limits=files)
    with (root / "proc/meminfo").open("a") as table:
        table.write(f"MemAvailable: {8 * GIB >> 10} kB\n")
    assert free_memory_bytes(root) == expected


def test_memory_of_a_machine_that_does_not_say_is_unknown(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == 0


def test_host_memory_is_no_more_than_the_memory_behind_it(tmp_path: Path) -> None:
    root = machine(tmp_path, limits={"memory.max": "4096\n"})
    assert most_host_memory_bytes(tmp_path, root) == 4096


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    root = machine(tmp_path)
    (root / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (root / "dev" / name).touch()
    assert count_gpus(root / "dev") == 2
    found = NodeCapacity(tmp_path, root, image="torch:1").read()
    assert (found.gpus, found.memory_bytes, found.image) == (2, 16 * GIB, "torch:1")
    assert found.cpus >= 1
    assert 0 < found.host_memory_free_bytes <= found.host_memory_bytes


def config(folder: Path) -> AgentConfig:
    (folder / "memory").mkdir()
    return AgentConfig(
        node="n0",
        controller="127.0.0.1:1",
        state_dir=folder / "state",
        memory_dir=folder / "memory",
        data_dir=folder / "data",
        workers=2,
    )


def test_slots_that_never_fit_are_told_from_those_that_do_not_fit_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(tmp_path)
    spec = parse_spec({"name": "job", "model": {"layers": 8, "hidden": 4096, "heads": 32}})
    start = agents_pb2.StartWorkers(ranks=[0])
    place = "checkpoint.memory_check.most_host_memory_bytes"
    monkeypatch.setattr(place, lambda folder: 1 << 20)
    with pytest.raises(StartRefusedError, match=r"it holds 1\.0 MiB in all") as refused:
        check_host_memory(given, "job-1", spec, start)
    assert refused.value.kind is ErrorKind.MISFIT

    monkeypatch.setattr(place, lambda folder: 1 << 60)
    monkeypatch.setattr("checkpoint.memory_check.free_bytes", lambda folder: 1 << 20)
    other = given.memory_dir / "job-0"
    other.mkdir()
    (other / "slot").write_bytes(bytes(1 << 20))
    with pytest.raises(StartRefusedError, match=r"used by job-0 \(1\.0 MiB\)") as refused:
        check_host_memory(given, "job-1", spec, start)
    assert refused.value.kind is ErrorKind.OCCUPIED
