"""What a node says of itself."""

from __future__ import annotations

from diagnostics.core.host import (
    Change,
    HostState,
    HostWatch,
    KernelLine,
    Subject,
    known_lines,
)


def state(
    memory: float = 0.5, kills: int = 3, disk: float = 0.5, kernel: tuple[KernelLine, ...] = ()
) -> HostState:
    return HostState(
        memory_available=memory, oom_kills=kills, disks_free={"data": disk}, kernel=kernel
    )


def test_a_full_disk_is_told_once_with_its_limit_and_when_it_is_over() -> None:
    watch = HostWatch()
    assert watch.take(state()) == []
    (change,) = watch.take(state(disk=0.01))
    assert (change.subject, change.what) == (Subject.DISK, "data")
    assert change.message == "1.0% of the disk of its folder 'data' is free (limit 5%, ours)"
    assert watch.take(state(disk=0.06)) == []
    assert watch.take(state(disk=0.2)) == [Change(subject=Subject.DISK, what="data", message="")]


def test_little_memory_is_told() -> None:
    (change,) = HostWatch().take(state(memory=0.02))
    assert change.message == "2.0% of its memory is left (limit 5%, ours)"


def test_processes_killed_before_the_agent_began_are_no_news() -> None:
    watch = HostWatch()
    assert watch.take(state(kills=7)) == []
    (change,) = watch.take(state(kills=9))
    assert change.message == "the kernel killed 2 processes for want of memory"


def test_the_kernel_s_words_come_with_what_they_mean() -> None:
    lines = known_lines(["usb 1-1: new device", "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, gone"])
    (change,) = HostWatch().take(state(kernel=lines))
    assert change.message.startswith(
        "the driver reports an error of a GPU (kernel log, class 'device', rule 'xid' of table 2)"
    )


def test_what_a_program_did_wrong_on_a_gpu_spares_its_node() -> None:
    lines = known_lines(
        [
            "NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python, Ch 00000008, MMU Fault",
            "NVRM: Xid (PCI:0000:3b:00): 95, pid=1234, Uncontained ECC error",
        ]
    )
    program, memory = HostWatch().take(state(kernel=lines))
    assert program.spares_node
    assert not memory.spares_node
