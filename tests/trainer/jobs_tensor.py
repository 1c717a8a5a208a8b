"""What ranks do in the tests of communication and tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outlast.blackbox import Group, Op
from outlast.layout import Layout
from tests.trainer.jobs import Silent, mesh_of
from tests.trainer.ranks import RankContext
from trainer.parallel.comm import Comm
from trainer.parallel.nccl import NcclComm
from trainer.parallel.tensor import TensorParallel, column_linear, row_linear, vocab_embedding
from trainer.parallel.timeline import HostTimeline

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# Of finite differences; the layers are linear, so only rounding limits it.
STEP = 1e-4


def rows_for_each(context: RankContext, counts: list[list[int]]) -> list[tuple[int, int]]:
    """Rows that name their sender and their place, sent by `counts[sender][receiver]`."""
    comm = mesh_of(context, Layout(dp=context.world_size)).dp
    sent, received = counts[comm.index], [row[comm.index] for row in counts]
    own = torch.tensor([[comm.index, place] for place in range(sum(sent))])
    rows = comm.all_to_all(own.view(-1, 2), sent, received)
    # And all the way back.
    assert torch.equal(comm.all_to_all(rows, received, sent), own.view(-1, 2))
    return [tuple(row) for row in rows.tolist()]


def several_under_way(context: RankContext, dtype: str, rows: int) -> dict[str, Any]:
    """Four kinds of operations of one group under way at once; two more beside them."""
    comm = mesh_of(context, Layout(dp=context.world_size)).dp
    size = comm.size
    generator = torch.Generator().manual_seed(context.rank)
    own = torch.randn(size * rows, 3, generator=generator).to(DTYPES[dtype])
    shard = own[:rows]

    late = [torch.empty_like(shard) for _ in range(size)]
    exchange = comm.start_exchange(late, Op.ALL_TO_ALL)
    gathered = own.new_empty((size * rows, 3))
    gather = comm.start_all_gather(shard, gathered)
    part = torch.empty_like(shard)
    scatter = comm.start_reduce_scatter(own, part)
    total = own.clone()
    reduce = comm.start_all_reduce(total)
    # A blocking one overtakes those under way, and messages leave after it.
    blocking = comm.all_reduce(own.clone())
    exchange.send(list(own.view(size, rows, 3)))
    reduce.advance()
    in_place = own.clone()
    own_part = in_place.view(size, rows, 3)[comm.index]
    again = comm.start_reduce_scatter(in_place, own_part)

    for pending in (again, reduce, scatter, gather, exchange):
        pending.wait()
    late[comm.index] = own.view(size, rows, 3)[comm.index]
    found = {
        "own": own,
        "gather": gathered,
        "scatter": part,
        "scatter_in_place": own_part,
        "reduce": total,
        "blocking": blocking,
        "exchange": torch.stack(late),
    }
    return {name: tensor.double().numpy() for name, tensor in found.items()}


def rounded_reduce_scatter(context: RankContext) -> dict[str, Any]:
    """fp32 parts that travel as bf16."""
    comm = mesh_of(context, Layout(dp=context.world_size)).dp
    own = torch.randn(context.world_size * 5, generator=torch.Generator().manual_seed(context.rank))
    part = torch.empty(5)
    comm.start_reduce_scatter(own, part, wire_dtype=torch.bfloat16).wait()
    return {"own": own.numpy(), "part": part.numpy(), "bytes_sent": comm.bytes_sent}


def widening_reduce_scatter(context: RankContext) -> dict[str, Any]:
    """bf16 gradients summed into fp32."""
    comm = mesh_of(context, Layout(dp=context.world_size)).dp
    generator = torch.Generator().manual_seed(context.rank)
    own = torch.randn(context.world_size * 5, generator=generator).bfloat16()
    part = torch.empty(5)
    comm.start_reduce_scatter(own, part).wait()
    return {"own": own.float().numpy(), "part": part.numpy()}


def waits_in_the_black_box(context: RankContext) -> list[tuple[Op, Group, int]]:
    """What a started and a blocking operation note, in order."""
    recorder = Silent()
    mesh = mesh_of(context, Layout(tp=context.world_size), recorder=recorder)
    out = torch.empty(context.world_size)
    gather = mesh.tp.start_all_gather(torch.ones(1), out)
    mesh.tp.all_reduce(torch.ones(1))
    gather.wait()
    return recorder.entered


def lost_under_way(context: RankContext) -> str:
    """Rank 1 leaves without a word while rank 0 has something under way."""
    comm = mesh_of(context, Layout(dp=2)).dp
    comm.all_reduce(torch.ones(1))
    if context.rank == 1:
        return ""
    try:
        comm.start_all_gather(torch.ones(1), torch.empty(2)).wait()
    except Exception as error:  # noqa: BLE001  # its type is what the test is about
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def traffic(context: RankContext, rows: int) -> dict[str, int]:
    """Bytes that each operation hands to the network, and the time counters."""
    comm = mesh_of(context, Layout(dp=context.world_size)).dp
    shard, whole = torch.zeros(rows), torch.zeros(comm.size * rows)
    operations = {
        "all_gather": lambda: comm.all_gather(shard),
        "reduce_scatter": lambda: comm.reduce_scatter(whole),
        "all_reduce": lambda: comm.all_reduce(whole),
        "start_all_gather": lambda: comm.start_all_gather(shard, whole).wait(),
        "start_reduce_scatter": lambda: comm.start_reduce_scatter(whole, shard).wait(),
        "start_all_reduce": lambda: comm.start_all_reduce(whole).wait(),
    }
    found = {}
    for name, operation in operations.items():
        before = comm.bytes_sent
        operation()
        found[name] = comm.bytes_sent - before
    return found | {"waited_ns": comm.waited_ns, "in_flight_ns": comm.in_flight_ns}


def parts_that_do_not_fit(context: RankContext) -> str:
    """What a whole that is no multiple of its part is refused with."""
    comm = mesh_of(context, Layout(dp=context.world_size)).dp
    try:
        comm.start_all_gather(torch.zeros(3), torch.zeros(7))
    except ValueError as error:
        # A rank that ends while its peer still connects would fail that one.
        comm.all_reduce(torch.ones(1))
        return str(error)
    return "nothing was raised"


def group_of_one(context: RankContext) -> list[Tensor]:
    """The asynchronous operations of a group without peers."""
    comm = mesh_of(context, Layout()).dp
    own = torch.arange(4.0)
    gathered, part = torch.empty(4), torch.empty(4)
    exchange = comm.start_exchange([own], Op.ALL_TO_ALL)
    exchange.send([own])
    reduce = comm.start_all_reduce(own)
    reduce.advance()
    for pending in (
        comm.start_all_gather(own, gathered),
        comm.start_reduce_scatter(own, part),
        reduce,
        exchange,
    ):
        pending.wait()
    return [gathered, part]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCase:
    """One parallel linear layer; sizes are those of the whole layer."""

    kind: str
    sequence_parallel: bool
    chunks: int
    has_bias: bool = True
    dtype: str = "fp64"
    seq_len: int = 12
    batch: int = 2
    width: int = 3
    features: int = 8
    # Sums of small integers are exact in any order.
    integers: bool = False

    def tensors(self) -> dict[str, Tensor]:
        """Input, weight and bias of the whole layer, and the gradient of its output."""
        inner, outer = (
            (self.width, self.features) if self.kind == "column" else (self.features, self.width)
        )
        shapes = {
            "x": (self.seq_len, self.batch, inner),
            "weight": (outer, inner),
            "bias": (outer,),
            "grad": (self.seq_len, self.batch, outer),
        }
        generator = torch.Generator().manual_seed(5)
        found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        if self.integers:
            found = {name: (4 * tensor).round() for name, tensor in found.items()}
        return {name: tensor.to(DTYPES[self.dtype]) for name, tensor in found.items()}

    def shard_dims(self) -> dict[str, int | None]:
        """The dim along which each tensor is split over the group; None for a copy."""
        sequence = 0 if self.sequence_parallel else None
        if self.kind == "column":
            return {"x": sequence, "weight": 0, "bias": 0, "grad": 2}
        return {"x": 2, "weight": 1, "bias": None, "grad": sequence}


def linear_layers(context: RankContext, cases: tuple[LinearCase, ...]) -> list[dict[str, Any]]:
    """Output, gradients, bytes sent and saved sizes of this rank, of each case."""
    comm = mesh_of(context, Layout(tp=context.world_size)).tp
    return [_linear_layer(case, comm) for case in cases]


def _linear_layer(case: LinearCase, comm: Comm) -> dict[str, Any]:
    own = _shards(case, case.tensors(), comm)
    leaves = [own[name].requires_grad_() for name in ("x", "weight", "bias")]
    before = comm.bytes_sent
    out = _apply_linear(case, own, comm)
    forward_bytes = comm.bytes_sent - before
    function = out.grad_fn if case.kind == "column" or not case.has_bias else _first_of(out)
    saved = sum(tensor.numel() for tensor in function.saved_tensors)
    out.backward(own["grad"])
    grads = {
        name: None if leaf.grad is None else leaf.grad.double().numpy()
        for name, leaf in zip(("x", "weight", "bias"), leaves, strict=True)
    }
    return grads | {
        "out": out.detach().double().numpy(),
        "forward_bytes": forward_bytes,
        "backward_bytes": comm.bytes_sent - before - forward_bytes,
        "num_saved": saved,
    }


def _first_of(out: Tensor) -> Any:
    assert out.grad_fn is not None
    return out.grad_fn.next_functions[0][0]


def _shards(case: LinearCase, tensors: dict[str, Tensor], comm: Comm) -> dict[str, Tensor]:
    own = {}
    for name, dim in case.shard_dims().items():
        whole = tensors[name]
        own[name] = (whole if dim is None else whole.chunk(comm.size, dim)[comm.index]).clone()
    return own


def _apply_linear(case: LinearCase, own: dict[str, Tensor], comm: Comm) -> Tensor:
    tp = TensorParallel(
        comm=comm,
        sequence_parallel=case.sequence_parallel and comm.size > 1,
        chunks=case.chunks,
        min_piece_bytes=1,
    )
    linear = column_linear if case.kind == "column" else row_linear
    return linear(own["x"], own["weight"], own["bias"] if case.has_bias else None, tp)


def linear_losses(context: RankContext, cases: tuple[LinearCase, ...]) -> list[dict[str, Any]]:
    """This rank's loss with every number of the whole layer moved, up and down."""
    comm = mesh_of(context, Layout(tp=context.world_size)).tp
    return [
        {name: _moved_losses(case, name, comm) for name in ("x", "weight", "bias")}
        for case in cases
    ]


def _moved_losses(case: LinearCase, name: str, comm: Comm) -> np.ndarray:
    losses = []
    for index in range(case.tensors()[name].numel()):
        for sign in (1.0, -1.0):
            tensors = case.tensors()
            tensors[name].view(-1)[index] += sign * STEP
            own = _shards(case, tensors, comm)
            losses.append((_apply_linear(case, own, comm) * own["grad"]).sum().item())
    return np.array(losses).reshape(-1, 2)


def embedding_layer(context: RankContext, sequence_parallel: bool) -> dict[str, Any]:
    """A vocabulary of 8 rows over the group: its output and this rank's gradient."""
    comm = mesh_of(context, Layout(tp=context.world_size)).tp
    tp = TensorParallel(comm=comm, sequence_parallel=sequence_parallel, chunks=3)
    generator = torch.Generator().manual_seed(9)
    table = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    tokens = torch.randint(0, 8, (8, 2), generator=generator)
    own = table.chunk(comm.size)[comm.index].clone().requires_grad_()
    out = vocab_embedding(tokens, own, tp)
    weights = torch.arange(48, dtype=torch.float64).view(8, 2, 3)
    out.backward(weights.chunk(comm.size)[comm.index] if sequence_parallel else weights)
    assert own.grad is not None
    return {"out": out.detach().numpy(), "grad": own.grad.numpy()}


class _StandIn:
    """Gloo where NCCL is expected: the same calls, but for coalesced messages."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._works: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _start_coalescing(self) -> None:
        self._works = []

    def _end_coalescing(self) -> _Works:
        return _Works(self._works)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._works.append(self._backend.send(tensors, peer, tag))
        return self._works[-1]

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._works.append(self._backend.recv(tensors, peer, tag))
        return self._works[-1]


class _Works:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def native_collectives(context: RankContext, case: LinearCase) -> dict[str, Any]:
    """What `NcclComm` calls, on a backend that needs no GPU, and a layer over it."""
    gloo: Any = mesh_of(context, Layout(tp=context.world_size)).tp
    # All ranks are one group here, so the backend below the group's is of the same members.
    comm = NcclComm(
        _StandIn(gloo._backend),
        group=gloo.group,
        ranks=gloo.ranks,
        index=gloo.index,
        recorder=Silent(),
        timeline=HostTimeline(),
    )
    layer = _linear_layer(case, comm)
    found = collectives_of(comm, torch.device("cpu"))
    return found | {"layer": layer}


def collectives_of(comm: Comm, device: torch.device) -> dict[str, Any]:
    """What each operation of a group gives this rank; "own" is what it brings."""
    generator = torch.Generator().manual_seed(comm.index)
    own = torch.randn(comm.size * 5, 3, generator=generator).to(device)
    gathered = torch.empty_like(own)
    part, rounded = (torch.empty(5, 3, device=device) for _ in range(2))
    comm.start_all_gather(own[:5], gathered).wait()
    comm.start_reduce_scatter(own, part).wait()
    comm.start_reduce_scatter(own, rounded, wire_dtype=torch.bfloat16).wait()
    reduce = comm.start_all_reduce(own.clone())
    reduce.advance()
    reduce.wait()
    found = {
        "own": own,
        "start_all_gather": gathered,
        "start_reduce_scatter": part,
        "rounded": rounded,
        "all_gather": comm.all_gather(own[:5]),
        "reduce_scatter": comm.reduce_scatter(own),
        "all_reduce": comm.all_reduce(own.clone()),
        "all_reduce_max": comm.all_reduce_max(own.clone()),
        "broadcast": comm.broadcast(own.clone(), 1),
    }
    return {name: tensor.cpu().numpy() for name, tensor in found.items()}
