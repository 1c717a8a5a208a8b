"""All-reduce between two nodes, data checked: what their link and its two ends can do.

One process per node, one path for both backends: NCCL where both have a CUDA
device, gloo elsewhere. The host listens and keeps the store, the guest connects.
What counts is the *fastest* round: a busy neighbour makes rounds slower and never
faster, while a bad link or port slows down every one of them.

A partner that never comes, falls silent or dies shows as a time-out or a broken
connection here; what that means is decided by whoever knows both sides. Trouble of
this process itself, such as memory that it does not get, raises and says nothing
of the exchange.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

from diagnostics.checks.base import Context, Emit
from diagnostics.checks.collectives import count_wrong_elements, expected_sum, pattern
from diagnostics.contention import Contention
from diagnostics.core.finding import Localises, Measurement
from diagnostics.core.links import BANDWIDTH, BROKEN, TEST, WRONG

HOST, GUEST = 0, 1
_BYTES_PER_ELEMENT = 4
# Time given to the rounds after the first, which pays for connections.
_MEASURE_S = 0.25
_MIN_ROUNDS = 2
# torch and gloo say everything with a RuntimeError; these are no word on the line.
_OWN_TROUBLE = (torch.OutOfMemoryError, torch.AcceleratorError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """One side's view of a test between two nodes."""

    address: str
    """Where the other node reaches this one."""
    peer: str
    timeout_s: float
    """For every wait on the partner; shorter than the check's own deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rounds:
    """What one side measured."""

    backend: str
    device: str
    started_s: float
    rounds_s: tuple[float, ...]
    wrong: int
    """Elements of all rounds that were not what they should be."""
    contended_ratio: float


def host(context: Context, pairing: Pairing, listener: socket.socket, emit: Emit) -> None:
    """Serve the store on `listener`, wait for the guest, and emit what was measured."""
    port = listener.getsockname()[1]
    with _noting_breaks(pairing, emit):
        store = TCPStore(
            pairing.address,
            port,
            world_size=2,
            is_master=True,
            timeout=timedelta(seconds=pairing.timeout_s),
            master_listen_fd=listener.detach(),
            wait_for_workers=False,
        )
        rounds = _exchange(HOST, store, context, pairing)
        guest_wrong, guest_contended = json.loads(store.get(f"result/{GUEST}"))
        _report(rounds, (int(guest_wrong), float(guest_contended)), context, pairing, emit)
        # The store ends with this process: the guest leaves first.
        store.get(f"left/{GUEST}")


def guest(context: Context, pairing: Pairing, address: str, port: int, emit: Emit) -> None:
    """Connect to the host's store and take part; emits nothing but that the exchange broke."""
    with _noting_breaks(pairing, emit):
        store = TCPStore(
            address,
            port,
            world_size=2,
            is_master=False,
            timeout=timedelta(seconds=pairing.timeout_s),
        )
        _exchange(GUEST, store, context, pairing)
        store.set(f"left/{GUEST}", "1")


def broken(peer: str, why: str, started_s: float) -> Measurement:
    """The exchange with `peer` came to nothing; `started_s` by the monotonic clock."""
    return Measurement(
        test=TEST,
        metric=BROKEN,
        value=1.0,
        unit="exchanges",
        localises=Localises.LINK,
        duration_s=time.monotonic() - started_s,
        detail=why,
        at_most=0.0,
        peer=peer,
    )


@contextmanager
def _noting_breaks(pairing: Pairing, emit: Emit) -> Iterator[None]:
    """Emit that the exchange broke where a wait timed out or a connection was lost."""
    started_s = time.monotonic()
    try:
        yield
    except _OWN_TROUBLE:
        raise
    except (RuntimeError, OSError) as error:
        emit(broken(pairing.peer, f"{type(error).__name__}: {error}", started_s))


def _exchange(rank: int, store: TCPStore, context: Context, pairing: Pairing) -> _Rounds:
    """Exchange data with the other side, and leave it what went wrong here."""
    torch.set_num_threads(1)
    started_s = time.monotonic()
    contention = Contention()
    backend, device = _agree_on_backend(rank, store, context)
    group = _make_group(backend, rank, store, pairing)
    num_elements = context.effort.pair_bytes // _BYTES_PER_ELEMENT
    source = pattern(num_elements, rank).to(device)
    wanted = expected_sum(num_elements, 2).to(device)
    result = torch.empty_like(source)
    first_s, wrong = _round(group, source, result, wanted)
    rounds_s = []
    for _ in range(_agree_on_rounds(first_s, rank, store, context.effort.max_pair_rounds)):
        elapsed_s, more_wrong = _round(group, source, result, wanted)
        rounds_s.append(elapsed_s)
        wrong += more_wrong
    contended_ratio = contention.ratio()
    # Through the store and not by a collective: those are what is being doubted.
    store.set(f"result/{rank}", json.dumps([wrong, contended_ratio]))
    # The other side may still be in its last round: the group must outlast that.
    store.get(f"result/{HOST if rank == GUEST else GUEST}")
    return _Rounds(
        backend=backend,
        device=device.type,
        started_s=started_s,
        rounds_s=tuple(rounds_s),
        wrong=wrong,
        contended_ratio=contended_ratio,
    )


def _report(
    rounds: _Rounds, guests: tuple[int, float], context: Context, pairing: Pairing, emit: Emit
) -> None:
    """Emit what the rounds say of the link; the guest counted and was contended so much."""
    guest_wrong, guest_contended = guests
    pair_bytes = context.effort.pair_bytes
    what = f"{rounds.backend}, {pair_bytes >> 20} MiB, best of {len(rounds.rounds_s)} rounds"
    counts = {context.node: rounds.wrong, pairing.peer: guest_wrong}
    blamed = [f"{node}: {count} wrong" for node, count in counts.items() if count]
    duration_s = time.monotonic() - rounds.started_s
    emit(
        Measurement(
            test=TEST,
            metric=WRONG,
            value=float(sum(counts.values())),
            unit="elements",
            localises=Localises.LINK,
            duration_s=duration_s,
            detail="; ".join([what, *blamed]),
            at_most=0.0,
            peer=pairing.peer,
        )
    )
    # Of two ranks each sends half and receives half, twice: as many bytes as the message has.
    bandwidth = pair_bytes / 1e9 / max(min(rounds.rounds_s), 1e-9)
    typical = pair_bytes / 1e9 / max(statistics.median(rounds.rounds_s), 1e-9)
    emit(
        Measurement(
            test=TEST,
            metric=BANDWIDTH,
            value=bandwidth,
            unit="GB/s",
            localises=Localises.LINK,
            duration_s=duration_s,
            detail=f"{what}, median {typical:.3g} GB/s",
            baseline_key=f"pair/{rounds.backend}/{rounds.device}/{pair_bytes}"
            f"/torch-{torch.__version__}",
            # Both ends work at it, so the busier one decides.
            contended_ratio=max(rounds.contended_ratio, guest_contended),
            peer=pairing.peer,
        )
    )


def _agree_on_backend(rank: int, store: TCPStore, context: Context) -> tuple[str, torch.device]:
    """NCCL if both sides have a device for it."""
    has_cuda = context.device != "cpu" and torch.cuda.is_available()
    store.set(f"cuda/{rank}", json.dumps(has_cuda))
    other_has = bool(json.loads(store.get(f"cuda/{1 - rank}")))
    if has_cuda and other_has:
        return "nccl", torch.device("cuda", 0)
    return "gloo", torch.device("cpu")


def _make_group(backend: str, rank: int, store: TCPStore, pairing: Pairing) -> Any:
    """A bare process group of two: no registry, and no look-up of host names."""
    timeout = timedelta(seconds=pairing.timeout_s)
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, 2, nccl)
    # The bindings exist; torch's stubs leave them out.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = 1
    # The interface that has this node's address: a host name may resolve to another.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=pairing.address)]
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _round(
    group: Any, source: torch.Tensor, result: torch.Tensor, wanted: torch.Tensor
) -> tuple[float, int]:
    """Seconds of one all-reduce, and how many elements of it are wrong."""
    result.copy_(source)
    if source.device.type == "cuda":
        torch.cuda.synchronize(source.device)
    started_s = time.monotonic()
    group.allreduce([result]).wait()
    if source.device.type == "cuda":
        torch.cuda.synchronize(source.device)
    elapsed_s = time.monotonic() - started_s
    return elapsed_s, count_wrong_elements(result, wanted)


def _agree_on_rounds(first_s: float, rank: int, store: TCPStore, most: int) -> int:
    """How many rounds fit into the time given; the slower side's word counts."""
    store.set(f"first/{rank}", json.dumps(first_s))
    slower_s = max(first_s, float(json.loads(store.get(f"first/{1 - rank}"))))
    return max(_MIN_ROUNDS, min(most, int(_MEASURE_S / max(slower_s, 1e-6))))
