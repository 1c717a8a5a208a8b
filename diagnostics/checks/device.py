"""Compute throughput, memory bandwidth and repeatability of each local device.

Throughput alone misses the devices that matter most: those that are fast and
wrong. So one seeded product is computed again and again and must be the same
bit for bit; comparing sums is not enough (a flip in a low bit of the mantissa
vanishes in a float sum). A device that is wrong in the same way each time agrees
with itself, so the digest of the product goes along, for its peers to differ from.
Some are wrong only while they and their neighbours draw power, so a thorough suite
ends with seconds of load on all of them, and compares every product of it.

On a CPU, time is the CPU time of the thread, because on a shared machine the
wall clock measures the neighbours; on CUDA it is the device's own events.
"""

from __future__ import annotations

import hashlib
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from diagnostics.checks.base import Context, Emit
from diagnostics.contention import Contention
from diagnostics.core.finding import Localises, Measurement
from diagnostics.core.plans import Effort

_SEED = 20_240_421
# The first runs pay for page faults, clock ramps and library start-up.
_WARM_UP_RUNS = 2
_MAX_RUNS = 200


def run(context: Context, emit: Emit) -> None:
    """Measure every device that this node's workers would use."""
    torch.set_num_threads(1)
    devices = local_devices(context.device, context.workers)
    effort = context.effort
    on_cuda = devices[0].type == "cuda"
    # Made once: on a node of eight large devices, this is what would take longest.
    seeded = _seeded(effort.matmul_size_cuda if on_cuda else effort.matmul_size)
    for device in devices:
        _check_device(device, seeded, effort, emit)
    if effort.burn_s:
        _burn(devices, seeded, effort.burn_s, emit)


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


def _check_device(device: torch.device, seeded: torch.Tensor, effort: Effort, emit: Emit) -> None:
    emit(_repeatability(device, seeded, effort.exact_rounds))
    emit(_matmul_throughput(device, seeded, effort.measure_s))
    num_bytes = effort.copy_bytes_cuda if device.type == "cuda" else effort.copy_bytes
    emit(_copy_bandwidth(device, num_bytes, effort.measure_s))


def _repeatability(device: torch.device, seeded: torch.Tensor, num_rounds: int) -> Measurement:
    """How many elements differ when one product is computed `num_rounds` times."""
    started_s = time.monotonic()
    wanted = torch.mm(*_on(device, seeded))
    differing = 0
    for _ in range(num_rounds - 1):
        # Copied again, so that an operand that changed in the device's memory shows too.
        differing += count_differing_elements(wanted, torch.mm(*_on(device, seeded)))
    size = seeded.shape[-1]
    return Measurement(
        test="compute",
        metric="differing_elements",
        value=float(differing),
        unit="elements",
        localises=Localises.DEVICE,
        duration_s=time.monotonic() - started_s,
        detail=f"{_where(device)}: {num_rounds} runs of one seeded {size}x{size} matmul",
        at_most=0.0,
        digest=hashlib.sha256(wanted.cpu().numpy().tobytes()).hexdigest(),
        digest_key=f"matmul/{_model(device)}/{_libraries(device)}/{size}",
    )


def _matmul_throughput(device: torch.device, seeded: torch.Tensor, seconds: float) -> Measurement:
    left, right = _on(device, seeded)
    out = torch.empty_like(left)
    size = seeded.shape[-1]
    flops = 2 * size**3
    return _throughput(
        lambda: torch.mm(left, right, out=out),
        device,
        seconds=seconds,
        work=flops / 1e9,
        test="compute",
        metric="matmul_throughput",
        unit="GFLOP/s",
        detail=f"{_where(device)}: float32 {size}x{size}",
        baseline_key=f"compute/{_history(device)}/{size}",
    )


def _copy_bandwidth(device: torch.device, num_bytes: int, seconds: float) -> Measurement:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _throughput(
        lambda: target.copy_(source),
        device,
        seconds=seconds,
        # Each byte is read once and written once.
        work=2 * num_bytes / 1e9,
        test="memory",
        metric="copy_bandwidth",
        unit="GB/s",
        detail=f"{_where(device)}: {num_bytes >> 20} MiB",
        baseline_key=f"memory/{_history(device)}/{num_bytes}",
    )


def _history(device: torch.device) -> str:
    """Whose earlier values count: the index too, since two cards of a node are two histories."""
    return f"{device}/{_model(device)}/torch-{torch.__version__}"


def _model(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


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


def _seeded(size: int) -> torch.Tensor:
    """Both operands, the same on every machine."""
    generator = torch.Generator(device="cpu").manual_seed(_SEED)
    return torch.randn(2, size, size, generator=generator)


def _on(device: torch.device, seeded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = seeded.to(device, copy=True).unbind()
    return left, right


def _where(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {_model(device)}"
    return "cpu, one thread"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What one device computes again and again."""

    device: torch.device
    left: torch.Tensor
    right: torch.Tensor
    wanted: torch.Tensor
    found: torch.Tensor
    # On the device, so that counting does not make it wait.
    differing: torch.Tensor

    def compute(self) -> None:
        """Queue one product and its comparison."""
        torch.mm(self.left, self.right, out=self.found)
        self.differing.add_((self.found.view(torch.int32) != self.wanted.view(torch.int32)).sum())


def _burn(devices: list[torch.device], seeded: torch.Tensor, seconds: float, emit: Emit) -> None:
    """Load every device at once for so long, and emit how many elements ever differed."""
    started_s = time.monotonic()
    loads = [_load(device, seeded) for device in devices]
    rounds = 0
    while rounds == 0 or time.monotonic() - started_s < seconds:
        for load in loads:
            load.compute()
        for load in loads:
            if load.device.type == "cuda":
                torch.cuda.synchronize(load.device)
        rounds += 1
    size = seeded.shape[-1]
    what = f"{rounds} products {size}x{size}, all devices at once"
    for load in loads:
        emit(
            Measurement(
                test="compute",
                metric="differing_elements_under_load",
                value=float(load.differing.item()),
                unit="elements",
                localises=Localises.DEVICE,
                duration_s=time.monotonic() - started_s,
                detail=f"{_where(load.device)}: {what}",
                at_most=0.0,
            )
        )


def _load(device: torch.device, seeded: torch.Tensor) -> _Load:
    left, right = _on(device, seeded)
    wanted = torch.mm(left, right)
    return _Load(
        device=device,
        left=left,
        right=right,
        wanted=wanted,
        found=torch.empty_like(wanted),
        differing=torch.zeros((), dtype=torch.int64, device=device),
    )


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
