"""The nodes of an attempt's ranks in the orders that go to each of them."""

from __future__ import annotations

import zlib

import pytest

from controller.command_messages import command_message
from controller.core.attempt_record import AttemptRecord, NodeStart
from controller.core.effects import SendCommand
from controller.core.orders import CommandRecord, StartWorkers
from controller.effects import Effects, UnmanagedCluster
from controller.ranknodes import pack, rank_nodes
from controller.sessions.session import Outgoing
from outlast.ids import Attempt, CommandId, JobId, NodeId
from outlast.v1 import agents_pb2
from tests.controller.test_busy import NoSearches


def _attempt(num_nodes: int, workers: int) -> AttemptRecord:
    return AttemptRecord(
        job=JobId("job"),
        attempt=Attempt(1),
        nodes=tuple(NodeId(f"gpu-{number:05d}") for number in range(num_nodes)),
        workers_per_node=workers,
        rendezvous_host="gpu-00000",
        rendezvous_port=29500,
        committed_step=-1,
        spec_json="{}",
        checkpoint_url="memory://",
        owner="",
    )


def _sent(attempt: AttemptRecord) -> agents_pb2.StartWorkers:
    sent: list[Outgoing] = []
    effects = Effects(
        lambda node, message: sent.append(message) is None, UnmanagedCluster(), NoSearches()
    )
    command = CommandRecord(
        command_id=CommandId("c"),
        node=NodeId("gpu-00000"),
        job=attempt.job,
        attempt=attempt.attempt,
        issued_s=0.0,
        command=StartWorkers(),
    )
    effects.run(SendCommand(command=command, start=NodeStart(attempt=attempt, ranks=(0,))))
    (message,) = sent
    return (message() if callable(message) else message).command.start_workers


@pytest.mark.parametrize(("num_nodes", "workers"), [(3, 2), (12_500, 8)])
def test_an_agent_reads_the_node_of_each_rank(num_nodes: int, workers: int) -> None:
    attempt = _attempt(num_nodes, workers)
    assert rank_nodes(_sent(attempt)) == attempt.rank_nodes


def test_an_order_of_a_large_attempt_is_small() -> None:
    """100,000 names took 1.2 MB in each of 12,500 orders."""
    assert _sent(_attempt(12_500, 8)).ByteSize() < 50_000


def test_an_order_of_a_small_attempt_names_its_nodes() -> None:
    start = _sent(_attempt(2, 1))
    assert (start.rank_nodes, start.packed_nodes) == (["gpu-00000", "gpu-00001"], b"")


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (b"garbage", "cannot be read"),
        (zlib.compress(b"\xff\xff"), "cannot be read"),
        (zlib.compress(b"a\nb\nc"), "names 3 nodes for 4 ranks"),
        # A bomb: what it unpacks to is cut.
        (zlib.compress(b"a" * 50_000_000), "names 1 nodes for 4 ranks"),
        (pack(("a", "b"))[:-4], "names 2 nodes for 4 ranks"),
    ],
)
def test_an_order_whose_nodes_cannot_be_read_is_refused(packed: bytes, words: str) -> None:
    start = agents_pb2.StartWorkers(world_size=4, packed_nodes=packed)
    with pytest.raises(ValueError, match=words):
        rank_nodes(start)


def test_every_command_can_be_made_without_packing() -> None:
    attempt = _attempt(2, 1)
    record = CommandRecord(
        command_id=CommandId("c"),
        node=NodeId("n"),
        job=attempt.job,
        attempt=attempt.attempt,
        issued_s=0.0,
        command=StartWorkers(),
    )
    start = command_message(record, NodeStart(attempt=attempt, ranks=(0,))).start_workers
    assert tuple(start.rank_nodes) == attempt.rank_nodes
