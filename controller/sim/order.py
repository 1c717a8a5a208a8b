"""A command under way on a simulated node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from controller.agent.core.inputs import Command
from controller.agent.core.ledger import CommandKind
from controller.sim.attempt import Start, Training
from outlast.ids import Attempt, JobId
from outlast.v1 import agents_pb2, diagnostics_pb2

if TYPE_CHECKING:
    from controller.sim.world import World


@dataclass(slots=True, kw_only=True, eq=False)
class Order:
    """A command under way."""

    command: Command
    message: agents_pb2.Command
    # Of an order to start: what all nodes' workers are given alike.
    start: Start | None = None
    # When nothing is left of the workers that it stops; None while nobody was signalled.
    settled_s: float | None = None
    findings: tuple[diagnostics_pb2.Finding, ...] = ()
    is_cancelled: bool = False

    @property
    def job(self) -> JobId:
        return JobId(self.command.job_id)

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.command.attempt)

    @property
    def is_stop(self) -> bool:
        return self.command.kind is CommandKind.STOP


def training_of(world: World, order: Order) -> Training:
    """That of the attempt which is started, as the first of its nodes makes it."""
    trainings, start = world.trainings, order.start
    training = trainings.get(order.job, order.attempt)
    if training is not None:
        return training
    assert start is not None
    trainings.forget_ended(order.job)
    return Training(
        job=world.jobs[order.job],
        attempt=order.attempt,
        rank_nodes=start.rank_nodes,
        endpoint=start.endpoint,
        committed_hint=start.committed_step,
        skipped=start.skipped,
        replayed_step=start.replayed_step,
        replica_shift=start.replica_shift,
    )


def without_nodes(message: agents_pb2.Command) -> agents_pb2.Command:
    """An order to start without the nodes of all ranks: thousands of nodes keep theirs.

    It is a copy, because protobuf frees the memory of a cleared field only with the whole
    message, and an attempt holds a part of that: its peers.
    """
    message.start_workers.packed_nodes = b""
    kept = agents_pb2.Command()
    kept.CopyFrom(message)
    return kept
