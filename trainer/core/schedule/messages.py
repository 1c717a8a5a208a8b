"""The messages that a schedule makes stages send, and how many can be under way.

The output of a chunk goes to the next position of the model, the gradient of its
input to the one before. All messages of one direction into one chunk form a lane.

A receive is posted ahead of its message, into a buffer that lives until the
message's last use. `num_buffers` says how many buffers a lane needs so that
every message that the other stages may possibly have sent finds its receive
posted, however late this stage is: more would never be used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from trainer.core.schedule.actions import Action, ActionKind, Schedule
from trainer.core.schedule.replay import Replay


class Lane(NamedTuple):
    """The messages of one direction into one chunk of a stage."""

    forward: bool
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One tensor from one stage to another; `lane` is the receiver's."""

    lane: Lane
    micro_batch: int
    sender: int
    receiver: int

    def number(self, num_micro_batches: int) -> int:
        """Tells it from every other message that its receiver gets in a step."""
        number = self.lane.chunk * num_micro_batches + self.micro_batch
        return 2 * number + (not self.lane.forward)


def incoming(schedule: Schedule, stage: int, action: Action) -> Message | None:
    """What `stage` must have received before it can do `action`."""
    position = schedule.position(stage, action.chunk)
    return _message(schedule, action, position - _WAYS[action.kind], position)


def outgoing(schedule: Schedule, stage: int, action: Action) -> Message | None:
    """What `stage` sends once it has done `action`."""
    position = schedule.position(stage, action.chunk)
    return _message(schedule, action, position, position + _WAYS[action.kind])


def last_used(schedule: Schedule, stage: int, action: Action) -> tuple[Message, ...]:
    """The messages that nobody on `stage` needs any more once it has done `action`."""
    parts: tuple[ActionKind, ...]
    match action.kind:
        case ActionKind.FORWARD:
            # The backward pass still needs the input, where there is one.
            parts = () if schedule.trains else (ActionKind.FORWARD,)
        case ActionKind.BACKWARD | ActionKind.BACKWARD_WEIGHT:
            parts = (ActionKind.FORWARD, ActionKind.BACKWARD)
        case ActionKind.BACKWARD_INPUT:
            parts = ()
    found = [
        incoming(
            schedule,
            stage,
            Action(kind=kind, micro_batch=action.micro_batch, chunk=action.chunk),
        )
        for kind in parts
    ]
    return tuple(message for message in found if message is not None)


def arrivals(schedule: Schedule, stage: int) -> dict[int, tuple[Message, ...]]:
    """All that `stage` receives in a step: by sender, in the order that it is sent in."""
    sent = {
        sender: tuple(
            message
            for action in actions
            if (message := outgoing(schedule, sender, action)) and message.receiver == stage
        )
        for sender, actions in enumerate(schedule.actions)
    }
    return {sender: messages for sender, messages in sent.items() if messages}


def num_buffers(schedule: Schedule, stage: int) -> dict[Lane, int]:
    """Most messages of each lane into `stage` that can be sent and not yet used up.

    Found by letting the other stages run as far as they can before each action
    of this one. Where nothing holds the others back (evaluation), two rounds of
    the pipeline are enough to keep it busy, and the sender waits.
    """
    replay = Replay(schedule)
    alive: Counter[Lane] = Counter()
    most: dict[Lane, int] = {}
    for action in schedule.actions[stage]:
        for message in _sent_by_others(schedule, stage, replay):
            alive[message.lane] += 1
            most[message.lane] = max(most.get(message.lane, 0), alive[message.lane])
        replay.advance(stage)
        for message in last_used(schedule, stage, action):
            alive[message.lane] -= 1
    limit = schedule.num_micro_batches if schedule.trains else 2 * schedule.num_stages
    return {lane: min(count, limit) for lane, count in most.items()}


def _sent_by_others(schedule: Schedule, stage: int, replay: Replay) -> list[Message]:
    """What reaches `stage` if it does nothing and all others go on until they must wait."""
    found: list[Message] = []
    others = [other for other in range(schedule.num_stages) if other != stage]
    progress = True
    while progress:
        progress = False
        for other in others:
            while (action := replay.advance(other)) is not None:
                progress = True
                message = outgoing(schedule, other, action)
                if message is not None and message.receiver == stage:
                    found.append(message)
    return found


# Up or down the model; weight gradients stay where they are.
_WAYS: Mapping[ActionKind, int] = MappingProxyType(
    {
        ActionKind.FORWARD: 1,
        ActionKind.BACKWARD: -1,
        ActionKind.BACKWARD_INPUT: -1,
        ActionKind.BACKWARD_WEIGHT: 0,
    }
)


def _message(schedule: Schedule, action: Action, source: int, target: int) -> Message | None:
    """What goes between two positions; None if they are one, or the model ends before."""
    positions = range(schedule.last_position + 1)
    if source == target or source not in positions or target not in positions:
        return None
    chunk, receiver = divmod(target, schedule.num_stages)
    return Message(
        lane=Lane(source < target, chunk),
        micro_batch=action.micro_batch,
        sender=source % schedule.num_stages,
        receiver=receiver,
    )
