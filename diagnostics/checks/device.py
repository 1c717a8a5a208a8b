"""Compute throughput, memory bandwidth and repeatability of each local device.

Throughput alone misses the devices that matter most: those that are fast and
wrong. So one seeded product is computed again and again and must be the same
bit for bit; comparing sums is not enough (a flip in a low bit of the mantissa
vanishes in a float sum). A device that is wrong in the same way each time agrees
with itself, so the digest of the product goes along, for its peers to differ from.

On a CPU, time is the CPU time of the thread, because on a shared machine the
wall clock measures the neighbours; on CUDA it is the device's own events.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from diagnostics.checks.base import Context, Emit
from diagnostics.contention import Contention
from diagnostics.core.finding import Localises, Measurement

_SEED = 20_240_421
# The first runs pay for page faults, clock ramps and library start-up.
_WARM_UP_RUNS = 2
_MAX_RUNS = 200


def run(context: Context, emit: Emit) -> None:
    """Measure every device that this node's workers would use."""
    torch.set_num_threads(1)
    for device in local_devices(context.device, context.workers):
        _check_device(device, context, emit)


def local_devices(wanted: str, workers: int) -> list[torch.device]:
    """The devices of a node's workers: one per worker on CUDA, else the CPU once."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return [torch.device("cpu")]
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError("device cuda was asked for and no CUDA device is visible")
    return [torch.device("cuda", index) for index in range(min(count, workers))]


def count_differing_elements(first: torch.Tensor, second: torch.Tensor) -> int:
    """How many float32 elements of two tensors differ in any bit, NaNs included."""
    return int((first.view(torch.int32) != second.view(torch.int32)).sum().item())


def _check_device(device: torch.device, context: Context, emit: Emit) -> None:
    effort = context.effort
    on_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_cuda else _cpu_name()
    where = f"{device} {name}" if on_cuda else "cpu, one thread"
    size = effort.matmul_size_cuda if on_cuda else effort.matmul_size
    num_bytes = effort.copy_bytes_cuda if on_cuda else effort.copy_bytes
    # The index is part of the key: two cards of a node are two histories.
    key = f"{device}/{name}/torch-{torch.__version__}"

    started_s = time.monotonic()
    left, right = _operands(size, device)
    wanted = torch.mm(left, right)
    differing = 0
    for _ in range(effort.exact_rounds - 1):
        # From the seed again, so that an operand that changed in memory shows too.
        left, right = _operands(size, device)
        differing += count_differing_elements(wanted, torch.mm(left, right))
    emit(
        Measurement(
            test="compute",
            metric="differing_elements",
            value=float(differing),
            unit="elements",
            localises=Localises.DEVICE,
            duration_s=time.monotonic() - started_s,
            detail=f"{where}: {effort.exact_rounds} runs of one seeded {size}x{size} matmul",
            at_most=0.0,
            digest=hashlib.sha256(wanted.cpu().numpy().tobytes()).hexdigest(),
            digest_key=f"matmul/{name}/{_libraries(device)}/{size}",
        )
    )

    out = torch.empty_like(wanted)
    flops = 2 * size**3
    emit(
        _throughput(
            lambda: torch.mm(left, right, out=out),
            device,
            seconds=effort.measure_s,
            work=flops / 1e9,
            test="compute",
            metric="matmul_throughput",
            unit="GFLOP/s",
            detail=f"{where}: float32 {size}x{size}",
            baseline_key=f"compute/{key}/{size}",
        )
    )
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    emit(
        _throughput(
            lambda: target.copy_(source),
            device,
            seconds=effort.measure_s,
            # Each byte is read once and written once.
            work=2 * num_bytes / 1e9,
            test="memory",
            metric="copy_bandwidth",
            unit="GB/s",
            detail=f"{where}: {num_bytes >> 20} MiB",
            baseline_key=f"memory/{key}/{num_bytes}",
        )
    )


def _libraries(device: torch.device) -> str:
    """Everything beside the device's model that decides how a product is rounded."""
    if device.type == "cuda":
        precision = torch.get_float32_matmul_precision()
        return f"torch-{torch.__version__}/cuda-{torch.version.cuda}/{precision}"
    return f"torch-{torch.__version__}/{torch.backends.cpu.get_cpu_capability()}"


def _cpu_name() -> str:
    """The processor's model, so that a history never outlives a change of machine."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _operands(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(_SEED)
    left, right = torch.randn(2, size, size, generator=generator).to(device).unbind()
    return left, right


def _throughput(
    body: Callable[[], object],
    device: torch.device,
    *,
    seconds: float,
    work: float,
    test: str,
    metric: str,
    unit: str,
    detail: str,
    baseline_key: str,
) -> Measurement:
    """`work` per second of the median run of `body`, run for about `seconds`."""
    started_s = time.monotonic()
    contention = Contention()
    for _ in range(_WARM_UP_RUNS):
        _timed_s(body, device)
    runs_s: list[float] = []
    while len(runs_s) < _MAX_RUNS and (not runs_s or sum(runs_s) < seconds):
        runs_s.append(_timed_s(body, device))
    # A clock that stands still for a whole run would make the value infinite.
    run_s = max(statistics.median(runs_s), 1e-9)
    return Measurement(
        test=test,
        metric=metric,
        value=work / run_s,
        unit=unit,
        localises=Localises.DEVICE,
        duration_s=time.monotonic() - started_s,
        detail=f"{detail}, median of {len(runs_s)} runs",
        baseline_key=baseline_key,
        contended_ratio=contention.ratio(),
    )


def _timed_s(body: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started_s = time.thread_time()
        body()
        return time.thread_time() - started_s
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch
        start.record()
        body()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
