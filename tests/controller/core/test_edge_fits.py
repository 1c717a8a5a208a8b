"""A message passes the quick look at its rules where the walk over them would do nothing."""

from __future__ import annotations

import random
import time

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from controller.core.edge.fits import is_sound
from controller.core.edge.rules import Reason, Unfit
from controller.core.edge.walk import MESSAGES, PLANS, Check
from tests.controller.edge.mutants import Sender, mutate


def _is_left_alone(message: Message, now_s: float) -> bool:
    """Whether the walk changes nothing of a message, and has nothing to say of it."""
    found: list[tuple[Reason, str]] = []

    def note(reason: Reason, where: str) -> None:
        found.append((reason, where))

    walked = type(message)()
    walked.CopyFrom(message)
    try:
        PLANS[message.DESCRIPTOR.name].check(walked, Check(now_s, 0.0, note, note))
    except Unfit:
        return False
    before = message.SerializePartialToString(deterministic=True)
    return not found and walked.SerializePartialToString(deterministic=True) == before


def test_quick_look_finds_the_same_as_the_walk() -> None:
    choice = random.Random(0)
    sender = Sender("n0")
    sender.running = {0: ("tiny-000000", 1), 1: ("tiny-000000", 1)}
    num_sound = {True: 0, False: 0}
    for _ in range(4_000):
        message = sender.any(choice)
        for _ in range(choice.choice((0, 1, 1, 2))):
            mutate(message, choice)
        now_s = time.time()
        expected = _is_left_alone(message, now_s)
        assert is_sound(message, now_s) is expected, message
        num_sound[expected] += 1
    assert min(num_sound.values()) > 400, num_sound


def test_quick_look_knows_every_kind_of_message() -> None:
    choice = random.Random(1)
    for name, descriptor in MESSAGES.items():
        for _ in range(200):
            message = GetMessageClass(descriptor)()
            for _ in range(choice.randrange(4)):
                mutate(message, choice)
            assert is_sound(message, 1.7e9) is _is_left_alone(message, 1.7e9), (name, message)
