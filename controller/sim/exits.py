"""What a worker leaves behind when it ends, as its agent reads it: words, not classes.

The controller makes a class of the words by its own rules. The texts are such as torch, NCCL,
CUDA and our trainer write.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.failures import FailureClass
from outlast.v1 import agents_pb2
from outlast.worker_contract import CLEAN_CODES

_GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
_NUM_FRAMES = 12
_FRAME = '  File "/job/train/layers.py", line {line}, in forward\n    x = self.layers[index](x)\n'
# Digits are left out of fingerprints.
_LETTERS = str.maketrans("0123456789", "ghijklmnop")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """Of one class of exits; `{which}` stands for what tells one failure from another."""

    exception_type: str = ""
    message: str = ""
    out_of_memory: str = ""


_TEXTS = {
    FailureClass.OOM_HOST: _Text(out_of_memory="oom_kill of its cgroup rose by 1"),
    FailureClass.NCCL: _Text(
        exception_type="torch.distributed.DistBackendError",
        message="NCCL error in: ProcessGroupNCCL.cpp:1331, internal error - please report this "
        "issue to the NCCL developers",
    ),
    FailureClass.DEVICE: _Text(
        exception_type="torch.AcceleratorError",
        message="CUDA error: uncorrectable ECC error encountered",
    ),
    FailureClass.STORAGE: _Text(
        exception_type="OSError", message="[Errno 5] Input/output error: '/data/train.bin'"
    ),
    FailureClass.USER_ERROR: _Text(exception_type="RuntimeError", message="rare {which}"),
    FailureClass.PROGRAM_ERROR: _Text(exception_type="ValueError", message="bad sample {which}"),
    FailureClass.CUDA_OOM: _Text(
        exception_type="torch.OutOfMemoryError",
        message="CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 79.15 GiB in all",
    ),
    FailureClass.CASCADE: _Text(exception_type="RuntimeError", message=_GLOO),
    FailureClass.NON_FINITE: _Text(
        exception_type="trainer.recovery.non_finite.NonFiniteLossError",
        message="step 7: loss nan, gradient norm inf; lower optimizer.lr, or look at the data of "
        "this step",
    ),
    FailureClass.CORRUPT: _Text(
        exception_type="trainer.recovery.replay.SilentCorruptionError",
        message="step 7: this replica, 1 (n2), computed other bits than another replica from the "
        "same samples and weights",
    ),
}


CLASSES = tuple(_TEXTS)


def left_behind(code: int, exit_class: FailureClass, which: str) -> agents_pb2.WorkerExit:
    """What a worker of this end leaves, without the times; `which` tells failures of users apart.

    One that was killed leaves no word, nor does one that ended in order.
    """
    text = _TEXTS.get(exit_class, _Text())
    if code in CLEAN_CODES:
        text = _Text()
    exit_ = agents_pb2.WorkerExit(
        code=code,
        exception_type=text.exception_type,
        exception_message=text.message.format(which=which.translate(_LETTERS)).strip(),
        out_of_memory=text.out_of_memory,
    )
    if exit_.exception_type:
        frames = "".join(_FRAME.format(line=10 + number) for number in range(_NUM_FRAMES))
        exit_.traceback = (
            f"Traceback (most recent call last):\n{frames}"
            f"{exit_.exception_type}: {exit_.exception_message}"
        )
    return exit_
