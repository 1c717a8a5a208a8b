"""What ranks do in the tests of communication and tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outlast.blackbox import Op
from outlast.layout import Layout
from tests.trainer.jobs import mesh_of
from tests.trainer.ranks import RankContext

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


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
