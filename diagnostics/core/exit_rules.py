"""The table of messages and what they mean; `exits` applies it.

Order matters: the first rule that fits wins, so narrow rules stand before wide
ones. Some samples of gloo, TCPStore and torch were taken from real runs of
torch 2.13; those of NCCL, CUDA and the kernel follow public reports and were
not captured here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outlast.failures import FailureClass

# Version of `RULES`; raised with every change, so that an incident says by which it is.
RULES_VERSION = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of message."""

    name: str
    exit_class: FailureClass
    pattern: re.Pattern[str]
    # Texts that this rule must classify, and texts that it must not match.
    matches: tuple[str, ...]
    misses: tuple[str, ...]
    # Whether it may decide from standard error, where warnings stand as well.
    in_stderr: bool = True


RULES: tuple[Rule, ...] = (
    Rule(
        name="more than the node has",
        exit_class=FailureClass.MISFIT,
        pattern=re.compile(
            r"^outlast\.errors\.MisfitError\b|Torch not compiled with CUDA enabled|"
            r"Found no NVIDIA driver on your system"
        ),
        matches=(
            "outlast.errors.MisfitError: host memory /dev/shm/outlast/job: checkpoints of 8 ranks "
            "need up to 412316860416 bytes and it holds 67108864 in all",
            "AssertionError: Torch not compiled with CUDA enabled",
            "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an "
            "NVIDIA GPU",
        ),
        misses=(
            # The node has GPUs, by their device files, and cannot use them.
            "RuntimeError: No CUDA GPUs are available: no CUDA-capable device is detected",
            "RuntimeError: CUDA out of memory. Tried to allocate 2 MiB",
        ),
    ),
    Rule(
        name="in use on the node",
        exit_class=FailureClass.OCCUPIED,
        pattern=re.compile(r"^outlast\.errors\.OccupiedError\b"),
        matches=(
            "outlast.errors.OccupiedError: host memory /dev/shm/outlast/job: 2 checkpoint slots of "
            "rank 3 need 83886080 bytes and 1048576 bytes are free of 1073741824",
        ),
        misses=(
            "outlast.errors.MisfitError: host memory /dev/shm/outlast/job: checkpoints of 8 ranks "
            "need up to 412316860416 bytes and it holds 67108864 in all",
            "OSError: [Errno 28] No space left on device: '/ckpt/step-40'",
        ),
    ),
    Rule(
        name="setting that cannot be met",
        exit_class=FailureClass.CONFIG,
        pattern=re.compile(r"^outlast\.errors\.SettingError\b"),
        matches=(
            "outlast.errors.SettingError: checkpoint.load: file:///ckpt/gpt-zhrpe: checkpoint step "
            "240 has no tensor model.blocks.8.mlp.up.weight: it is of another model; load it with "
            "the model section that saved it",
        ),
        misses=(
            # Of the job's own checkpoint, which has the job's model.
            "checkpoint.core.errors.LayoutMismatchError: checkpoint step 240 has no tensor "
            "model.blocks.8.mlp.up.weight: it is of another model",
            "outlast.errors.MisfitError: 8 workers need a GPU each and this node has 4",
        ),
        in_stderr=False,
    ),
    Rule(
        name="no checkpoint to load",
        exit_class=FailureClass.CHECKPOINT,
        pattern=re.compile(r"^checkpoint\.core\.errors\.NoCheckpointError\b"),
        matches=(
            "checkpoint.core.errors.NoCheckpointError: file:///ckpt/job has no checkpoint that can "
            "be loaded: step 40: step-40.1/0.distcp: bytes 0 to 4096 do not fit their checksum",
        ),
        misses=(
            # An older one may be whole.
            "checkpoint.core.errors.CorruptCheckpointError: checkpoint step 40: it is missing",
        ),
        in_stderr=False,
    ),
    Rule(
        name="device memory",
        exit_class=FailureClass.CUDA_OOM,
        pattern=re.compile(
            r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|"
            r"CUDA error: out of memory"
        ),
        matches=(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a "
            "total capacity of 79.15 GiB",
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
            "`cublasCreate(handle)`",
            "RuntimeError: CUDA error: out of memory",
        ),
        misses=(
            "Out of memory: Killed process 4242 (python)",
            "MemoryError: Unable to allocate 8.00 GiB for an array",
        ),
    ),
    Rule(
        name="kernel out of memory",
        exit_class=FailureClass.OOM_HOST,
        pattern=re.compile(r"[Oo]ut of memory: Killed process|oom-kill:|OOMKilled"),
        matches=(
            "Out of memory: Killed process 4242 (python) total-vm:81788928kB",
            "Memory cgroup out of memory: Killed process 87 (python3)",
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null)",
        ),
        misses=("CUDA out of memory. Tried to allocate 2 MiB", "Killed"),
    ),
    Rule(
        name="host allocation",
        exit_class=FailureClass.OOM_HOST,
        pattern=re.compile(
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|^MemoryError\b|"
            r"Cannot allocate memory|std::bad_alloc"
        ),
        matches=(
            "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: "
            "can't allocate memory: you tried to allocate 4503599627370496 bytes. Error code 12 "
            "(Cannot allocate memory)",
            "MemoryError: ",
            "OSError: [Errno 12] Cannot allocate memory",
            "terminate called after throwing an instance of 'std::bad_alloc'",
        ),
        misses=("RuntimeError: CUDA out of memory. Tried to allocate 2 MiB",),
    ),
    Rule(
        name="device fault",
        exit_class=FailureClass.DEVICE,
        pattern=re.compile(
            r"uncorrectable (?:NVLink|ECC) error|ECC error encountered|fallen off the bus|"
            r"Invalid access of peer GPU memory|"
            r"all CUDA-capable devices are busy|device not ready|no CUDA-capable device|"
            r"only supported with GPUs, no GPUs found"
        ),
        matches=(
            "RuntimeError: CUDA error: uncorrectable ECC error encountered",
            "RuntimeError: CUDA error: uncorrectable NVLink error was detected",
            "RuntimeError: No CUDA GPUs are available: no CUDA-capable device is detected",
            "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        ),
        misses=(
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "RuntimeError: CUDA error: device-side assert triggered",
        ),
    ),
    Rule(
        name="kernel fault",
        exit_class=FailureClass.DEVICE_KERNEL,
        pattern=re.compile(
            r"an illegal memory access|unspecified launch failure|misaligned address|"
            r"illegal instruction was encountered"
        ),
        matches=(
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            "RuntimeError: CUDA error: unspecified launch failure",
        ),
        misses=(
            "RuntimeError: CUDA error: device-side assert triggered",
            "IndexError: index out of range in self",
        ),
    ),
    Rule(
        name="wrong bits on another replica",
        exit_class=FailureClass.CASCADE,
        pattern=re.compile(r"SilentCorruptionError: step \d+: not this replica"),
        matches=(
            "trainer.recovery.replay.SilentCorruptionError: "
            "step 7: not this replica: one of 1 (n2) "
            "computed other bits than another replica from the same samples and weights",
        ),
        misses=(
            "trainer.recovery.replay.SilentCorruptionError: "
            "step 7: this replica, 1 (n2), computed other "
            "bits than another replica from the same samples and weights",
        ),
    ),
    Rule(
        name="wrong bits somewhere",
        exit_class=FailureClass.CORRUPT_SOMEWHERE,
        pattern=re.compile(r"SilentCorruptionError: step \d+: one of"),
        matches=(
            "trainer.recovery.replay.SilentCorruptionError: "
            "step 7: one of the replicas 0 (n1), 1 (n2) "
            "computed other bits than another replica from the same samples and weights",
        ),
        misses=(
            "trainer.recovery.replay.SilentCorruptionError: "
            "step 7: this replica, 1 (n2), computed other "
            "bits than another replica from the same samples and weights",
        ),
    ),
    Rule(
        name="wrong bits",
        exit_class=FailureClass.CORRUPT,
        pattern=re.compile(r"SilentCorruptionError: step \d+: this replica"),
        matches=(
            "trainer.recovery.replay.SilentCorruptionError: "
            "step 7: this replica, 1 (n2), computed other "
            "bits than another replica from the same samples and weights",
        ),
        misses=(
            "trainer.recovery.replay.SilentCorruptionError: "
            "step 7: not this replica: one of 1 (n2) "
            "computed other bits than another replica from the same samples and weights",
            # A line of every rank's traceback.
            "    raise SilentCorruptionError(self._in_words(found))",
        ),
    ),
    Rule(
        name="not a number on another rank",
        exit_class=FailureClass.CASCADE,
        pattern=re.compile(r"NonFiniteLossError: step \d+: .* of another rank"),
        matches=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss 2.25, gradient norm inf of another "
            "rank; lower optimizer.lr, or look at the data of this step",
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss nan of another rank, gradient norm "
            "inf; lower optimizer.lr, or look at the data of this step",
        ),
        misses=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss nan, gradient norm inf; lower "
            "optimizer.lr, or look at the data of this step",
        ),
    ),
    Rule(
        name="own gradient not a number",
        exit_class=FailureClass.NON_FINITE_OWN,
        pattern=re.compile(r"NonFiniteLossError: step \d+: .* of this rank"),
        matches=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss 2.25, gradient norm inf of this rank; "
            "lower optimizer.lr, or look at the data of this step",
        ),
        misses=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss 2.25, gradient norm inf; lower "
            "optimizer.lr, or look at the data of this step",
        ),
    ),
    Rule(
        name="gradient not a number",
        exit_class=FailureClass.NON_FINITE_GRADIENT,
        # All ranks share the gradient by then, so this one is no more to blame than others.
        pattern=re.compile(r"NonFiniteLossError: step \d+: loss -?\d\S*, gradient norm"),
        matches=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss 2.25, gradient norm inf; lower "
            "optimizer.lr, or look at the data of this step",
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss 1e-05, gradient norm inf; lower "
            "optimizer.lr, or look at the data of this step",
        ),
        misses=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss -inf, gradient norm inf; lower "
            "optimizer.lr, or look at the data of this step",
        ),
    ),
    Rule(
        name="not a number",
        exit_class=FailureClass.NON_FINITE,
        pattern=re.compile(r"NonFiniteLossError: "),
        matches=(
            "trainer.recovery.non_finite.NonFiniteLossError: "
            "step 7: loss nan, gradient norm inf; lower "
            "optimizer.lr, or look at the data of this step",
        ),
        misses=(
            "step 7: overflow at loss scale 65536.0; skipped",
            # A line of every rank's traceback.
            "    raise NonFiniteLossError(",
        ),
    ),
    Rule(
        name="program out of step",
        exit_class=FailureClass.USER_ERROR,
        pattern=re.compile(
            r"Detected mismatch between collectives|ncclInvalidUsage|ncclInvalidArgument|"
            r"device-side assert triggered"
        ),
        matches=(
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running "
            "collective: CollectiveFingerPrint(SequenceNumber=4, OpType=ALLREDUCE)",
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2356, "
            "invalid usage, ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
            "RuntimeError: CUDA error: device-side assert triggered",
        ),
        misses=("RuntimeError: NCCL error: unhandled system error",),
    ),
    Rule(
        name="storage",
        exit_class=FailureClass.STORAGE,
        pattern=re.compile(
            r"No space left on device|Disk quota exceeded|Stale (?:NFS )?file handle|"
            r"\[Errno 5\] Input/output error|Read-only file system|Transport endpoint is not "
            r"connected|StorageUnavailableError|CorruptCheckpointError|ManifestIncompleteError"
        ),
        matches=(
            "OSError: [Errno 28] No space left on device: '/ckpt/step-40'",
            "OSError: [Errno 116] Stale file handle",
            "OSError: [Errno 5] Input/output error",
            "OSError: [Errno 30] Read-only file system: '/ckpt'",
            "OSError: [Errno 122] Disk quota exceeded",
            "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/fuse'",
            "checkpoint.storage.storage.StorageUnavailableError: file:///ckpt cannot be written",
        ),
        misses=(
            "FileNotFoundError: [Errno 2] No such file or directory: 'train.txt'",
            "RuntimeError: Connection closed by peer",
        ),
    ),
    Rule(
        name="peer connection lost",
        exit_class=FailureClass.CASCADE,
        pattern=re.compile(
            r"Connection (?:was )?(?:likely )?(?:reset|closed)(?: by (?:remote )?peer)?|"
            r"Connection refused|Broken pipe|ncclRemoteError|ncclSystemError|"
            r"unhandled system error|"
            r"recvValueWithTimeout failed|failed to recv, got 0 bytes|"
            r"Application timeout caused pair closure|remote process (?:exited|has terminated)|"
            r"^(?:ConnectionError|ConnectionResetError|BrokenPipeError|ConnectionAbortedError)\b|"
            r"Socket closed"
        ),
        matches=(
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
            "Connection closed by peer [127.0.0.1]:24988. This is typically caused by a remote "
            "worker crashing. Check the logs of the remote worker before reporting an error.",
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
            "Read error [127.0.0.1]:35756: Connection reset by peer.",
            "torch.distributed.DistNetworkError: Connection was likely closed. Did the remote "
            "server shutdown or crash?",
            "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
            "RuntimeError: Application timeout caused pair closure",
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote "
            "process exited or there was a network error, NCCL version 2.21.5",
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1331, "
            "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5",
            "ncclRemoteError: A call failed possibly due to a network error or a remote process "
            "exiting prematurely.",
            "socketProgressOpt: Call to recv from 10.0.0.7<4341> failed : Connection reset by peer",
            "ConnectionResetError: [Errno 104] Connection reset by peer",
            "BrokenPipeError: [Errno 32] Broken pipe",
        ),
        misses=(
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 2x3)",
            "ValueError: I/O operation on closed file",
        ),
    ),
    Rule(
        name="waited for a peer in vain",
        exit_class=FailureClass.CASCADE,
        pattern=re.compile(
            r"Timed out waiting \d+ ?ms for (?:recv|send) operation|"
            r"collective operation timeout: WorkNCCL|"
            r"client socket has (?:timed out|failed to connect)|DistStoreError|"
            r"wait timeout after \d+ ?ms"
        ),
        matches=(
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
            "unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
            "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1204, "
            "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)",
            "torch.distributed.DistNetworkError: The client socket has timed out after 1000ms "
            "while trying to connect to (127.0.0.1, 1).",
            "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0",
        ),
        misses=("TimeoutError: my data loader took too long",),
    ),
    Rule(
        name="collective library",
        exit_class=FailureClass.NCCL,
        pattern=re.compile(
            r"ncclInternalError|ncclUnhandledCudaError|NCCL error|"
            r"NCCL WARN|NET/IB ?: Got completion|NET/IB ?: .*[Aa]sync fatal event|"
            r"DistBackendError"
        ),
        matches=(
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1331, "
            "internal error - please report this issue to the NCCL developers",
            "ncclInternalError: Internal check failed.",
            "node7:81:142 [0] transport/net_ib.cc:1280 NCCL WARN NET/IB : Got completion from peer "
            "10.0.0.9<38172> with status=12 opcode=129 len=0 vendor err 129",
            "NET/IB : mlx5_2:1 async fatal event on CQ (0x7f40): CQ error",
        ),
        misses=("NCCL version 2.21.5+cuda12.4", "RuntimeError: No backend type associated"),
    ),
    Rule(
        name="shapes and arguments",
        exit_class=FailureClass.PROGRAM_ERROR,
        pattern=re.compile(
            r"shapes cannot be multiplied|must match the size of tensor|"
            r"shape '\[.*\]' is invalid for input|size mismatch|inconsistent tensor size|"
            r"Expected all tensors to be on the same device|does not require grad|"
            r"modified by an inplace operation"
        ),
        matches=(
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 2x3)",
            "RuntimeError: The size of tensor a (3) must match the size of tensor b (4) at "
            "non-singleton dimension 1",
            "RuntimeError: shape '[2]' is invalid for input of size 3",
            "RuntimeError: inconsistent tensor size, expected tensor [3] and src [4]",
        ),
        misses=("RuntimeError: Connection closed by peer",),
        in_stderr=False,
    ),
    Rule(
        name="not there",
        exit_class=FailureClass.MISSING,
        pattern=re.compile(
            r"^(?:FileNotFoundError|PermissionError|IsADirectoryError|NotADirectoryError|"
            r"ImportError|ModuleNotFoundError)\b"
        ),
        matches=(
            "FileNotFoundError: [Errno 2] No such file or directory: 'train.txt'",
            "PermissionError: [Errno 13] Permission denied: '/data/train.txt'",
            "ModuleNotFoundError: No module named 'flash_attn'",
            "ImportError: libcudart.so.12: cannot open shared object file",
        ),
        misses=(
            "OSError: [Errno 5] Input/output error",
            "ValueError: FileNotFoundError in a message",
        ),
        in_stderr=False,
    ),
    Rule(
        name="interpreter",
        exit_class=FailureClass.PROGRAM_ERROR,
        pattern=re.compile(
            r"^(?:KeyError|IndexError|AttributeError|TypeError|ValueError(?!: (?:cannot )?mmap )|"
            r"NameError|UnboundLocalError|AssertionError|ZeroDivisionError|SyntaxError|"
            r"IndentationError|RecursionError|NotImplementedError)\b"
        ),
        matches=(
            "KeyError: 'input_ids'",
            "AssertionError: heads must divide by tp",
            "SyntaxError: invalid syntax (model.py, line 3)",
        ),
        misses=(
            "RuntimeError: KeyError in a message",
            "OSError: [Errno 5] Input/output error",
            # Of what was read, which may be damaged.
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0",
            "ValueError: cannot mmap an empty file",
            "ValueError: mmap length is greater than file size",
        ),
        in_stderr=False,
    ),
)
