"""The table of lines in the logs of running workers.

Libraries write about a failing GPU, link or store long before a process ends of it, if it
ends at all. What only follows from another rank's end (a closed connection) is no rule
here: it says nothing that the end itself does not say better.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from diagnostics.core.rules.table import Rule, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMeaning:
    """What a line means."""

    says: str
    # Whether the node itself is at fault, so that checking and leaving it may help.
    blames_node: bool
    # The cause of the incident that tells of it.
    cause: str = "worker_log"


WorkerRule = Rule[WorkerMeaning]

_RULES: tuple[WorkerRule, ...] = (
    Rule(
        name="gpu memory",
        pattern=re.compile(
            r"uncorrectable (?:NVLink|ECC) error (?:encountered|detected)|"
            r"CUDA_ERROR_ECC_UNCORRECTABLE|"
            r"cudaErrorECCUncorrectable",
        ),
        means=WorkerMeaning(
            says="a GPU's memory or NVLink reports an error that it could not correct",
            blames_node=True,
        ),
        matches=(
            "RuntimeError: CUDA error: uncorrectable ECC error encountered",
            "CUDA error: uncorrectable NVLink error detected during the execution",
            "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
        ),
        misses=("Volatile uncorrectable ECC errors: 0",),
    ),
    Rule(
        name="gpu lost",
        pattern=re.compile(
            r"CUDA error: (?:unspecified launch failure|the launch timed out|"
            r"CUDA-capable device\(s\) is/are busy or unavailable)|"
            r"Unable to determine the device handle for GPU|GPU is lost",
        ),
        means=WorkerMeaning(
            says="a GPU does not answer",
            blames_node=True,
        ),
        matches=(
            "torch.AcceleratorError: CUDA error: unspecified launch failure",
            "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.",
        ),
        misses=("CUDA error: device-side assert triggered", "using device cuda:0"),
    ),
    Rule(
        name="rdma",
        pattern=re.compile(
            r"NET/IB *:.*Got completion .*(?:with (?:status=|error )(?!0\b)\d+)|"
            r"NET/IB *:.*Got (?:async|fatal async) event *: ",
        ),
        means=WorkerMeaning(
            says="NCCL reports an RDMA port or a path that loses packets",
            blames_node=True,
        ),
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
    Rule(
        name="collective",
        pattern=re.compile(r"Watchdog caught collective operation timeout"),
        means=WorkerMeaning(
            says="torch's watchdog gives a collective operation up; who held it up is told "
            "elsewhere",
            blames_node=False,
        ),
        matches=(
            "[rank3]:[E1122 05:02:14 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective "
            "operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000)",
        ),
        misses=("ProcessGroupNCCL Watchdog thread started",),
    ),
    Rule(
        name="mount",
        pattern=re.compile(
            r"\[Errno (?:5|107|116)\]|Stale file handle|Transport endpoint is not connected",
        ),
        means=WorkerMeaning(
            says="a file system that the node has mounted does not answer or reports errors",
            blames_node=True,
        ),
        matches=(
            "OSError: [Errno 116] Stale file handle: '/data/tokens.bin'",
            "OSError: [Errno 5] Input/output error",
            "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/s3'",
        ),
        misses=("FileNotFoundError: [Errno 2] No such file or directory: 'a'",),
    ),
    Rule(
        name="disk full",
        pattern=re.compile(r"\[Errno (?:28|122)\]|No space left on device|Disk quota exceeded"),
        means=WorkerMeaning(
            says="a worker finds no room on a disk",
            blames_node=False,
        ),
        matches=(
            "OSError: [Errno 28] No space left on device",
            "OSError: [Errno 122] Disk quota exceeded",
        ),
        misses=("297 GB of space left on the device",),
    ),
    Rule(
        name="storage",
        pattern=re.compile(r"^waiting for checkpoint storage "),
        means=WorkerMeaning(
            says="a start waits for checkpoint storage that does not answer",
            blames_node=False,
            # It ends with the next checkpoint that is committed.
            cause="storage",
        ),
        matches=(
            "waiting for checkpoint storage s3://runs/job-1: cannot list commits: Connection "
            "refused; next try in 0.8 s, for 900 s more",
        ),
        misses=("rank 0 (pp 0, dp 0, tp 0), attempt 2: training on after step 30, from storage",),
    ),
    Rule(
        name="loader",
        pattern=re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed|exited)"),
        means=WorkerMeaning(
            says="a process that reads data was killed",
            blames_node=False,
        ),
        matches=(
            "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
            "RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly",
        ),
        misses=("DataLoader worker (pid 4711) reads 12 files",),
    ),
)

WORKER_LOG = Table(name="worker log", version=2, rules=_RULES)
