"""Orders to a node's runner, one per line, and how it answers.

An order and an answer are flat records in JSON. A pair test takes two orders:
the host's runner listens and says where, then the guest's connects to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from diagnostics.core import flatjson


class OrderKind(StrEnum):
    """What to do."""

    SUITE = "suite"
    HOST = "host"
    GUEST = "guest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One thing to do, on one node."""

    kind: OrderKind
    # Decides which checks run and how hard they work.
    suite: str
    deadline_s: float
    # Of the job whose checkpoints are written there, "" for none.
    checkpoint_url: str = ""
    # A job trains on this node: a slow value is no sign of a fault.
    is_disturbed: bool = False
    # For a pair test: this node's own address and the other node.
    address: str = ""
    peer: str = ""
    # For a guest: where the host listens.
    peer_address: str = ""
    peer_port: int = 0

    def to_json(self) -> str:
        """One line of JSON."""
        return flatjson.to_json(self)

    @staticmethod
    def from_json(text: str) -> Order:
        """The order that `to_json` wrote; raises ValueError for anything else."""
        return flatjson.from_json(Order, text)


def listening(port: int) -> str:
    """The line by which a host says where it listens."""
    return json.dumps({"listening": port})


DONE = json.dumps({"done": True})
