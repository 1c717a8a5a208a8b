"""What lines in the logs of running workers mean.

Libraries write about a failing GPU, link or store long before a process ends of it, if it
ends at all. What only follows from another rank's end (a closed connection) is no rule
here: it says nothing that the end itself does not say better.

What does not belong here: what the end of a worker means (`exit_rules`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Version of `WORKER_RULES`; raised with every change, so that an incident says by which it is.
RULES_VERSION = 2
_MAX_WORDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRule:
    """One kind of line in a worker's log, and lines that it must and must not match."""

    name: str
    pattern: re.Pattern[str]
    means: str
    # Whether the node itself is at fault, so that checking and leaving it may help.
    blames_node: bool
    # The cause of the incident that tells of it.
    cause: str = "worker_log"
    matches: tuple[str, ...]
    misses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A line that a rule knows."""

    rule: WorkerRule
    words: str


WORKER_RULES: tuple[WorkerRule, ...] = (
    WorkerRule(
        name="gpu memory",
        pattern=re.compile(
            r"uncorrectable (?:NVLink|ECC) error (?:encountered|detected)|"
            r"CUDA_ERROR_ECC_UNCORRECTABLE|"
            r"cudaErrorECCUncorrectable",
        ),
        means="a GPU's memory or NVLink reports an error that it could not correct",
        blames_node=True,
        matches=(
            "RuntimeError: CUDA error: uncorrectable ECC error encountered",
            "CUDA error: uncorrectable NVLink error detected during the execution",
            "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
        ),
        misses=("Volatile uncorrectable ECC errors: 0",),
    ),
    WorkerRule(
        name="gpu lost",
        pattern=re.compile(
            r"CUDA error: (?:unspecified launch failure|the launch timed out|"
            r"CUDA-capable device\(s\) is/are busy or unavailable)|"
            r"Unable to determine the device handle for GPU|GPU is lost",
        ),
        means="a GPU does not answer",
        blames_node=True,
        matches=(
            "torch.AcceleratorError: CUDA error: unspecified launch failure",
            "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.",
        ),
        misses=("CUDA error: device-side assert triggered", "using device cuda:0"),
    ),
    WorkerRule(
        name="rdma",
        pattern=re.compile(
            r"NET/IB *:.*Got completion .*(?:with (?:status=|error )(?!0\b)\d+)|"
            r"NET/IB *:.*Got (?:async|fatal async) event *: ",
        ),
        means="NCCL reports an RDMA port or a path that loses packets",
        blames_node=True,
        matches=(
            "node-3:411:502 [2] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<45013> with "
            "status=12 opcode=0 len=0 vendor err 129 (Send)",
            "node-3:411:502 [0] NCCL WARN NET/IB : Got completion with error 5, opcode 48",
            "node-3:411:511 [0] NCCL WARN NET/IB : mlx5_1:1 Got async event : port error",
        ),
        misses=(
            "node-3:411:411 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1",
        ),
    ),
    WorkerRule(
        name="collective",
        pattern=re.compile(r"Watchdog caught collective operation timeout"),
        means="torch's watchdog gives a collective operation up; who held it up is told elsewhere",
        blames_node=False,
        matches=(
            "[rank3]:[E1122 05:02:14 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective "
            "operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000)",
        ),
        misses=("ProcessGroupNCCL Watchdog thread started",),
    ),
    WorkerRule(
        name="mount",
        pattern=re.compile(
            r"\[Errno (?:5|107|116)\]|Stale file handle|Transport endpoint is not connected",
        ),
        means="a file system that the node has mounted does not answer or reports errors",
        blames_node=True,
        matches=(
            "OSError: [Errno 116] Stale file handle: '/data/tokens.bin'",
            "OSError: [Errno 5] Input/output error",
            "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/s3'",
        ),
        misses=("FileNotFoundError: [Errno 2] No such file or directory: 'a'",),
    ),
    WorkerRule(
        name="disk full",
        pattern=re.compile(r"\[Errno (?:28|122)\]|No space left on device|Disk quota exceeded"),
        means="a worker finds no room on a disk",
        blames_node=False,
        matches=(
            "OSError: [Errno 28] No space left on device",
            "OSError: [Errno 122] Disk quota exceeded",
        ),
        misses=("297 GB of space left on the device",),
    ),
    WorkerRule(
        name="storage",
        pattern=re.compile(r"^waiting for checkpoint storage "),
        means="a start waits for checkpoint storage that does not answer",
        blames_node=False,
        # It ends with the next checkpoint that is committed.
        cause="storage",
        matches=(
            "waiting for checkpoint storage s3://runs/job-1: cannot list commits: Connection "
            "refused; next try in 0.8 s, for 900 s more",
        ),
        misses=("rank 0 (pp 0, dp 0, tp 0), attempt 2: training on after step 30, from storage",),
    ),
    WorkerRule(
        name="loader",
        pattern=re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed|exited)"),
        means="a process that reads data was killed",
        blames_node=False,
        matches=(
            "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
            "RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly",
        ),
        misses=("DataLoader worker (pid 4711) reads 12 files",),
    ),
)


def known_lines(lines: Iterable[str]) -> tuple[Match, ...]:
    """Lines that some rule knows, each with what it means; the first line of each rule."""
    found: dict[str, Match] = {}
    for line in lines:
        rule = next((rule for rule in WORKER_RULES if rule.pattern.search(line)), None)
        if rule is not None and rule.name not in found:
            which = f"worker log, rule {rule.name!r} of table {RULES_VERSION}"
            words = f"{rule.means} ({which}): {line.strip()[:_MAX_WORDS]}"
            found[rule.name] = Match(rule=rule, words=words)
    return tuple(found.values())
