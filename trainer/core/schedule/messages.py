"""The messages that a schedule makes stages send, and how many can be under way.

The output of a chunk goes to the next position of the model, the gradient of its
input to the one before: as a message, unless the same stage stands there. All messages
of one direction into one chunk form a channel.

A receive is posted ahead of its message, into a buffer that lives until the
message's last use. `num_buffers` says how many buffers a channel needs so that
every message that the other stages may possibly have sent finds its receive
posted, however late this stage is: more would never be used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from trainer.core.schedule.actions import Action, ActionKind, Schedule
from trainer.core.schedule.replay import Replay


class Channel(NamedTuple):
    """The messages of one direction into one chunk of a stage."""

    forward: bool
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One tensor from one stage to another; `channel` is the receiver's."""

    channel: Channel
    micro_batch: int
    sender: int
    receiver: int

    def number(self, num_micro_batches: int) -> int:
        """Tells it from every other message that its receiver gets in a step."""
        number = self.channel.chunk * num_micro_batches + self.micro_batch
        return 2 * number + (not self.channel.forward)


def incoming(schedule: Schedule, stage: int, action: Action) -> Message | None:
    """What `stage` must have received before it can do `action`."""
    position = schedule.position(stage, action.chunk)
    return _message(schedule, action, position - _WAYS[action.kind], position)


def outgoing(schedule: Schedule, stage: int, action: Action) -> Message | None:
    """What `stage` sends once it has done `action`."""
    position = schedule.position(stage, action.chunk)
    return _message(schedule, action, position, position + _WAYS[action.kind])


def handed_over(schedule: Schedule, stage: int, action: Action) -> int | None:
    """The chunk of the same stage that takes what `action` makes, if one does."""
    position = schedule.position(stage, action.chunk)
    target = position + _WAYS[action.kind]
    if target == position or not 0 <= target <= schedule.last_position:
        return None
    receiver, chunk = schedule.chunk_at(target)
    return chunk if receiver == stage else None


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


def links(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """(sender, receiver) of every way that messages take, in the order to connect them.

    All stages that connect theirs in this order end, since all wait for the same
    one first; and ways between other stages than one's neighbours come in the same
    turn, so that a long pipeline takes no longer.
    """
    found = {
        (sender, message.receiver)
        for sender, actions in enumerate(schedule.actions)
        for action in actions
        if (message := outgoing(schedule, sender, action)) is not None
    }
    return tuple(sorted(found, key=lambda link: (abs(link[0] - link[1]), min(link) % 2, link)))


def num_buffers(schedule: Schedule, stages: Collection[int]) -> dict[int, dict[Channel, int]]:
    """For each of `stages`, most messages of each channel that can be sent and not yet used up.

    That is while the other stages have run as far as they can and the stage itself
    is late. Where nothing holds the others back (evaluation), two rounds of
    the pipeline are enough to keep it busy, and the sender waits.
    """
    limit = schedule.num_micro_batches if schedule.trains else 2 * schedule.num_stages
    arrived = _soonest_arrivals(schedule, stages)
    return {
        stage: {
            channel: min(count, limit)
            for channel, count in _most_alive(schedule, stage, arrived[stage]).items()
        }
        for stage in stages
    }


def _soonest_arrivals(
    schedule: Schedule, stages: Collection[int]
) -> dict[int, Counter[tuple[int, Channel]]]:
    """For each of `stages`, how many messages can arrive as soon as it has done so many actions.

    An action of another stage needs as many of them as the action before it, and as
    the message that it waits for: one run on paper finds all.
    """
    arrived: dict[int, Counter[tuple[int, Channel]]] = {stage: Counter() for stage in stages}
    # What each stage, and each message on its way, needs to be done of every one of `stages`.
    done = [dict.fromkeys(stages, 0) for _ in range(schedule.num_stages)]
    carried: dict[tuple[int, Channel, int], dict[int, int]] = {}
    for stage, action in Replay(schedule).run():
        own = done[stage]
        needed = incoming(schedule, stage, action)
        if needed is not None:
            theirs = carried.pop((stage, needed.channel, needed.micro_batch))
            own = done[stage] = {late: max(own[late], theirs[late]) for late in stages}
        if stage in own:
            own = done[stage] = {**own, stage: own[stage] + 1}
        made = outgoing(schedule, stage, action)
        if made is not None:
            carried[made.receiver, made.channel, made.micro_batch] = own
            if made.receiver in own:
                arrived[made.receiver][own[made.receiver], made.channel] += 1
    return arrived


def _most_alive(
    schedule: Schedule, stage: int, arrived: Mapping[tuple[int, Channel], int]
) -> dict[Channel, int]:
    """The most messages of each channel that have arrived and are not used up, over a step."""
    by_action: dict[int, list[tuple[Channel, int]]] = {}
    for (num_done, channel), count in arrived.items():
        by_action.setdefault(num_done, []).append((channel, count))
    alive: Counter[Channel] = Counter()
    most: dict[Channel, int] = {}
    for num_done, action in enumerate(schedule.actions[stage]):
        for channel, count in by_action.get(num_done, ()):
            alive[channel] += count
            most[channel] = max(most.get(channel, 0), alive[channel])
        for message in last_used(schedule, stage, action):
            alive[message.channel] -= 1
    return most


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
    """What goes from stage to stage; None if it stays on one, or the model ends before."""
    last = schedule.last_position
    if not 0 <= source <= last or not 0 <= target <= last:
        return None
    (sender, _), (receiver, chunk) = schedule.chunk_at(source), schedule.chunk_at(target)
    if sender == receiver:
        return None
    return Message(
        channel=Channel(source < target, chunk),
        micro_batch=action.micro_batch,
        sender=sender,
        receiver=receiver,
    )
