"""Journalled commands as messages for their agents. Pure functions.

An order to start is made of what is journalled once for the whole attempt and of what its own
node gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from controller.core.attempt_record import AttemptRecord, NodeStart
from controller.core.orders import (
    CommandRecord,
    ForgetJob,
    PushCheckpoint,
    RunSuite,
    StartWorkers,
    StopWorkers,
)
from controller.ranknodes import MOST_PLAIN_RANKS, pack
from outlast.chosen import ChosenStart
from outlast.spec.older import for_agents
from outlast.v1 import agents_pb2, common_pb2


class NodesPacker:
    """Nodes of the attempt that was started last, packed once for all its orders."""

    def __init__(self) -> None:
        self._packed: tuple[AttemptRecord, bytes] | None = None

    def pack(self, start: NodeStart | None) -> bytes:
        """The nodes of an attempt of many ranks; nothing for one of few."""
        if start is None or start.attempt.world_size <= MOST_PLAIN_RANKS:
            return b""
        attempt = start.attempt
        if self._packed is None or self._packed[0] is not attempt:
            self._packed = (attempt, pack(attempt.nodes))
        return self._packed[1]


def command_message(
    record: CommandRecord, start: NodeStart | None = None, packed_nodes: bytes = b""
) -> agents_pb2.Command:
    """A journalled command, for its agent; an order to start with what `start` says.

    `packed_nodes` are the nodes of its attempt as `ranknodes.pack` gives them, for one of many
    ranks.
    """
    message = agents_pb2.Command(
        command_id=record.command_id, job_id=record.job or "", attempt=record.attempt
    )
    match record.command:
        case StartWorkers():
            assert start is not None, f"{record.command_id} belongs to no attempt"
            message.start_workers.CopyFrom(_start_message(start, packed_nodes))
        case StopWorkers() as stop:
            message.stop_workers.CopyFrom(
                agents_pb2.StopWorkers(
                    graceful=stop.graceful,
                    timeout_s=stop.timeout_s,
                    capture_stacks=stop.capture_stacks,
                    keep=stop.keep,
                )
            )
        case RunSuite() as suite:
            message.run_suite.CopyFrom(
                agents_pb2.RunSuite(
                    suite=suite.suite,
                    timeout_s=suite.timeout_s,
                    checkpoint_url=suite.checkpoint_url,
                )
            )
        case PushCheckpoint() as push:
            message.push_checkpoint.CopyFrom(
                agents_pb2.PushCheckpoint(
                    checkpoint_url=push.checkpoint_url, timeout_s=push.timeout_s, owner=push.owner
                )
            )
        case ForgetJob():
            message.forget_job.CopyFrom(agents_pb2.ForgetJob())
        case _:
            assert_never(record.command)
    return message


def chosen_messages(chosen: Iterable[ChosenStart]) -> list[common_pb2.ChosenStart]:
    """Where persons let a job go on."""
    return [
        common_pb2.ChosenStart(
            step=each.step, attempt=each.attempt, url=each.url, url_step=each.url_step
        )
        for each in chosen
    ]


def _start_message(start: NodeStart, packed_nodes: bytes) -> agents_pb2.StartWorkers:
    attempt = start.attempt
    return agents_pb2.StartWorkers(
        spec_json=for_agents(attempt.spec_json),
        ranks=start.ranks,
        world_size=attempt.world_size,
        rendezvous_host=attempt.rendezvous_host,
        rendezvous_port=attempt.rendezvous_port,
        rank_nodes=() if packed_nodes else attempt.rank_nodes,
        packed_nodes=packed_nodes,
        committed_step=attempt.committed_step,
        checkpoint_url=attempt.checkpoint_url,
        replica_peers=[
            agents_pb2.ReplicaPeer(
                node_id=peer.node,
                address=peer.address,
                port=peer.port,
                token=peer.token,
            )
            for peer in start.replica_peers
        ],
        owner=attempt.owner,
        skipped=[
            common_pb2.StepRange(first=each.first, last=each.last) for each in attempt.skipped
        ],
        replayed_step=attempt.replayed_step or 0,
        suspect_nodes=attempt.suspects,
        chosen_starts=chosen_messages(attempt.chosen),
        replica_shift=attempt.replica_shift,
    )
