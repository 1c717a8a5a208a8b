"""All-reduce and all-to-all among a node's workers, data checked, bandwidth measured.

One local process per worker and one path for both backends: NCCL where every
worker has a CUDA device of its own, gloo over loopback elsewhere. Inputs are
small whole numbers, so that every correct result is exact in float32 whatever
the order of summation.

Bandwidth is bus bandwidth (bytes that cross the slowest link per second, as
nccl-tests defines it), so that it does not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

from diagnostics import children
from diagnostics.checks.base import Context, Emit, SkipCheckError
from diagnostics.contention import Contention
from diagnostics.core.finding import Localises, Measurement
from outlast.worker_contract import GLOO_INTERFACE

# A peer that says nothing for so long is gone; the check's own deadline is longer.
_PEER_TIMEOUT = timedelta(seconds=10)
_BYTES_PER_ELEMENT = 4
# Time given to each collective; the number of rounds follows from the first one.
_MEASURE_S = 0.25
_MIN_ROUNDS = 3
# Whole numbers up to this, summed over any realistic number of workers, stay exact.
_PATTERN_PERIOD = 1021


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """One worker's view of the group."""

    rank: int
    world_size: int
    device: torch.device
    store: TCPStore


def run(context: Context, emit: Emit) -> None:
    """Fork the workers, let rank 0 emit, and report whoever failed.

    Raises:
        SkipCheckError: there is nothing to exchange with a single worker.
        RuntimeError: a worker failed or died; the text says which and how.
    """
    if context.workers < 2:
        raise SkipCheckError("the node has one worker, so there is no local peer")
    errors_in, errors_out = os.pipe()
    with socket.socket() as listener:
        # Bound here and handed to rank 0's store, so that the port cannot be lost.
        listener.bind(("127.0.0.1", 0))
        listener.listen(context.workers)
        pids = [
            children.fork(_guarded(rank, context, listener, errors_out, emit))
            for rank in range(context.workers)
        ]
    os.close(errors_out)
    failures = _wait_for_all(pids)
    if failures:
        with os.fdopen(errors_in, encoding="utf-8", errors="replace") as texts:
            raise RuntimeError("; ".join([*texts.read().splitlines(), *failures]))
    os.close(errors_in)


def pattern(num_elements: int, rank: int) -> torch.Tensor:
    """A rank's input: whole numbers that differ by position and rank."""
    repeats = -(-num_elements // _PATTERN_PERIOD)
    return torch.arange(rank, rank + _PATTERN_PERIOD).float().repeat(repeats)[:num_elements]


def expected_sum(num_elements: int, world_size: int) -> torch.Tensor:
    """What an all-reduce of every rank's `pattern` must give."""
    return pattern(num_elements, 0).mul_(world_size).add_(sum(range(world_size)))


def expected_exchange(num_elements: int, rank: int, world_size: int) -> torch.Tensor:
    """What `rank` must hold after an all-to-all of every rank's `pattern`."""
    chunk = num_elements // world_size
    mine = pattern(num_elements, 0)[rank * chunk : (rank + 1) * chunk]
    return torch.cat([mine + peer for peer in range(world_size)])


def count_wrong_elements(result: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many elements differ; a NaN is always wrong."""
    if torch.equal(result, wanted):
        return 0
    return int((result != wanted).sum().item())


def _guarded(
    rank: int, context: Context, listener: socket.socket, errors_out: int, emit: Emit
) -> Callable[[], None]:
    """`_worker` with its failure written as one line to `errors_out`."""

    def body() -> None:
        try:
            _worker(rank, context, listener, emit)
        except Exception as error:
            text = f"rank {rank}: {type(error).__name__}: {error}".replace("\n", " ")
            # Below PIPE_BUF, so that lines of several workers never mix.
            os.write(errors_out, text[:1000].encode() + b"\n")
            raise

    return body


def _wait_for_all(pids: list[int]) -> list[str]:
    """Reap every worker; the first failure kills the rest. Returns who died, and how."""
    left = dict(zip(pids, range(len(pids)), strict=True))
    failures: list[str] = []
    while left:
        pid, status = os.wait()
        rank = left.pop(pid)
        if status == 0:
            continue
        if not failures or os.WIFEXITED(status):
            failures.append(f"rank {rank} {children.describe(status)}")
        for other in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
    return failures


def _worker(rank: int, context: Context, listener: socket.socket, emit: Emit) -> None:
    torch.set_num_threads(1)
    # Loopback is where local peers are; without this gloo asks the resolver first.
    os.environ[GLOO_INTERFACE] = "lo"
    backend, device = _backend(rank, context)
    store = TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        world_size=context.workers,
        is_master=rank == 0,
        master_listen_fd=listener.detach() if rank == 0 else None,
        wait_for_workers=False,
        timeout=_PEER_TIMEOUT,
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=context.workers, timeout=_PEER_TIMEOUT
    )
    peer = _Peer(rank=rank, world_size=context.workers, device=device, store=store)
    num_elements = context.effort.collective_bytes // _BYTES_PER_ELEMENT
    num_elements -= num_elements % context.workers
    for name in ("all_reduce", "all_to_all"):
        _measure(name, peer, num_elements, context, emit)
    # Rank 0 hosts the store: it leaves last, or the others fail while leaving.
    store.set(f"left/{rank}", "1")
    if rank == 0:
        for other in range(context.workers):
            store.get(f"left/{other}")


def _backend(rank: int, context: Context) -> tuple[str, torch.device]:
    """NCCL needs a device per worker; anything less goes over gloo."""
    cuda_devices = torch.cuda.device_count() if context.device != "cpu" else 0
    if cuda_devices >= context.workers:
        return "nccl", torch.device("cuda", rank)
    return "gloo", torch.device("cpu")


def _measure(name: str, peer: _Peer, num_elements: int, context: Context, emit: Emit) -> None:
    """Run one collective for a number of rounds, check each result, tell rank 0."""
    started_s = time.monotonic()
    contention = Contention()
    source = pattern(num_elements, peer.rank).to(peer.device)
    if name == "all_reduce":
        wanted = expected_sum(num_elements, peer.world_size).to(peer.device)
    else:
        wanted = expected_exchange(num_elements, peer.rank, peer.world_size).to(peer.device)
    result = torch.empty_like(source)
    first_s, wrong = _round(name, source, result, wanted)
    rounds = _agree_on_rounds(first_s, peer.device, context.effort.max_collective_rounds)
    rounds_s: list[float] = []
    for _ in range(rounds):
        elapsed_s, more_wrong = _round(name, source, result, wanted)
        rounds_s.append(elapsed_s)
        wrong += more_wrong
    # Through the store and not by a collective: those are what is being doubted.
    facts = json.dumps({"wrong": wrong, "round_s": statistics.median(rounds_s)})
    peer.store.set(f"{name}/{peer.rank}", facts)
    if peer.rank != 0:
        return
    results = [json.loads(peer.store.get(f"{name}/{rank}")) for rank in range(peer.world_size)]
    _emit_results(
        name,
        peer,
        emit,
        wrong=[int(result["wrong"]) for result in results],
        # A collective is over when its slowest member is.
        round_s=max(float(result["round_s"]) for result in results),
        num_bytes=num_elements * _BYTES_PER_ELEMENT,
        rounds=rounds,
        duration_s=time.monotonic() - started_s,
        contended_ratio=contention.ratio(),
    )


def _round(
    name: str, source: torch.Tensor, result: torch.Tensor, wanted: torch.Tensor
) -> tuple[float, int]:
    """Seconds of one collective into `result`, and how many of its elements are wrong."""
    if name == "all_reduce":
        result.copy_(source)
    else:
        result.zero_()
    _synchronize(source.device)
    started_s = time.monotonic()
    if name == "all_reduce":
        dist.all_reduce(result)
    else:
        dist.all_to_all_single(result, source)
    _synchronize(source.device)
    elapsed_s = time.monotonic() - started_s
    return elapsed_s, count_wrong_elements(result, wanted)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agree_on_rounds(first_s: float, device: torch.device, most: int) -> int:
    """How many rounds fit into the time given; the slowest rank's word counts."""
    slowest = torch.tensor([first_s], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return max(_MIN_ROUNDS, min(most, int(_MEASURE_S / max(slowest.item(), 1e-6))))


def _emit_results(
    name: str,
    peer: _Peer,
    emit: Emit,
    *,
    wrong: list[int],
    round_s: float,
    num_bytes: int,
    rounds: int,
    duration_s: float,
    contended_ratio: float,
) -> None:
    backend = dist.get_backend()
    what = f"{backend}, {peer.world_size} workers, {num_bytes >> 20} MiB, {rounds} rounds"
    blamed = [f"rank {rank}: {count}" for rank, count in enumerate(wrong) if count]
    emit(
        Measurement(
            test=name,
            metric="wrong_elements",
            value=float(sum(wrong)),
            unit="elements",
            localises=Localises.NODE,
            duration_s=duration_s,
            detail="; ".join([what, *blamed]),
            at_most=0.0,
        )
    )
    share = (peer.world_size - 1) / peer.world_size
    bus_bytes = num_bytes * share * (2 if name == "all_reduce" else 1)
    emit(
        Measurement(
            test=name,
            metric="bus_bandwidth",
            value=bus_bytes / 1e9 / max(round_s, 1e-9),
            unit="GB/s",
            localises=Localises.NODE,
            duration_s=duration_s,
            detail=what,
            baseline_key=f"{name}/{backend}/{peer.device.type}/{peer.world_size}/{num_bytes}"
            f"/torch-{torch.__version__}",
            contended_ratio=contended_ratio,
        )
    )
