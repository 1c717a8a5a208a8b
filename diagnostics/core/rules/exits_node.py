"""Ends of workers for want of something on their node, or by a fault of it."""

from __future__ import annotations

import re

from diagnostics.core.rules.exit_meaning import ExitMeaning, ExitRule
from diagnostics.core.rules.table import Rule
from outlast.failures import FailureClass

NODE: tuple[ExitRule, ...] = (
    Rule(
        name="more than the node has",
        means=ExitMeaning(fault_class=FailureClass.MISFIT),
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
        means=ExitMeaning(fault_class=FailureClass.OCCUPIED),
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
        means=ExitMeaning(fault_class=FailureClass.CONFIG, in_stderr=False),
        pattern=re.compile(r"^outlast\.errors\.SettingError\b"),
        matches=(
            "outlast.errors.SettingError: checkpoint.load: file:///ckpt/gpt-zhrpe: checkpoint step "
            "240 has no tensor model.blocks.8.mlp.up.weight: it is of another model; load it with "
            "the model section that saved it",
            "outlast.errors.SettingError: data: s3://corpora/web/train.bin has changed since this "
            "attempt began: it is gone; put back what the job began with",
            "outlast.errors.SettingError: data: /data/web.bin has the id 50300 as token 1840022 "
            "(counted from 0), beyond model.vocab_size = 50257; allowed: 0 to 50256. It was made "
            "with another tokenizer, or is damaged",
        ),
        misses=(
            # Of the job's own checkpoint, which has the job's model.
            "checkpoint.core.errors.LayoutMismatchError: checkpoint step 240 has no tensor "
            "model.blocks.8.mlp.up.weight: it is of another model",
            "outlast.errors.MisfitError: 8 workers need a GPU each and this node has 4",
        ),
    ),
    Rule(
        name="no checkpoint to load",
        means=ExitMeaning(fault_class=FailureClass.CHECKPOINT, in_stderr=False),
        pattern=re.compile(r"^checkpoint\.core\.errors\.NoCheckpointError\b"),
        matches=(
            "checkpoint.core.errors.NoCheckpointError: file:///ckpt/job has no checkpoint that can "
            "be loaded: step 40: step-40.1/0.distcp: bytes 0 to 4096 do not fit their checksum",
        ),
        misses=(
            # An older one may be whole.
            "checkpoint.core.errors.CorruptCheckpointError: checkpoint step 40: it is missing",
        ),
    ),
    Rule(
        name="device memory",
        means=ExitMeaning(fault_class=FailureClass.CUDA_OOM),
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
        means=ExitMeaning(fault_class=FailureClass.OOM_HOST),
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
        means=ExitMeaning(fault_class=FailureClass.OOM_HOST),
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
        means=ExitMeaning(fault_class=FailureClass.DEVICE),
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
        means=ExitMeaning(fault_class=FailureClass.DEVICE_KERNEL),
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
)
