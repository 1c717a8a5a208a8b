"""What the ranks of a script tell each other from save to save: a few numbers, of which the
smallest counts.

A round begins with one save and is read at the next, by when it has ended as a rule: nobody waits.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from checkpoint.restore.peers import Peers
from checkpoint.stage.hostcopy import host_bytes
from outlast.blackbox import Group, Op, OpRecord
from outlast.interfaces import interface_towards
from outlast.session.process import TIMEOUT_S, Session
from outlast.worker_contract import GLOO_INTERFACE

# A process that ends while it is in a round would take the others' results with it.
_END_S = 5.0
# A wait as short as gloo has them.
_AT_ONCE = timedelta(milliseconds=1)


class Unrecorded:
    """Takes what the session's own operations say: they are not the script's."""

    def enter(
        self, op: Op, group: Group, detail: int = -1, peer: int = -1, message: int = -1
    ) -> int:
        return 0

    def leave(self, departed_ns: int = 0) -> None:
        return

    def stands_in(self, operation: OpRecord) -> None:
        return

    def ended(self, operation: OpRecord) -> None:
        return


class Rounds:
    """One rank's part in them; alone, it agrees with itself."""

    def __init__(self, backend: Any) -> None:
        """`backend` is gloo's, of all ranks; None where there is one rank."""
        self._backend = backend
        self._row: Tensor | None = None
        self._work: Any = None
        atexit.register(self._finish)

    def begin(self, numbers: Sequence[int]) -> None:
        """Tell the others these."""
        self._row = torch.tensor(numbers, dtype=torch.int64)
        if self._backend is None:
            return
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]  # two names of one type
        self._work = self._backend.allreduce([self._row], options)

    def result(self) -> list[int] | None:
        """The smallest of each of what all ranks told in the last round; None before the first."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._row is None:
            return None
        found: list[int] = self._row.tolist()
        return found

    def abandon(self) -> None:
        """Have no part in them any more."""
        atexit.unregister(self._finish)
        work, self._work = self._work, None
        if work is not None:
            # By a wait that runs out gloo closes its connections: one that is dropped with a
            # message under way reads for ever.
            with contextlib.suppress(RuntimeError):
                work.wait(_AT_ONCE)
        self._backend = None

    def _finish(self) -> None:
        if self._work is not None:
            with contextlib.suppress(RuntimeError):
                self._work.wait(timedelta(seconds=_END_S))


class RanksOf:
    """All ranks, as a restore asks them: they are on hosts, whatever their device."""

    device = torch.device("cpu")

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    @property
    def rank(self) -> int:
        return self._peers.rank

    def fold(self, row: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        raw = self._peers.gather(bytes(host_bytes(row.contiguous())))
        rows = [torch.frombuffer(bytearray(each), dtype=row.dtype) for each in raw]
        return combine(torch.stack(rows)).view(row.shape)


def rounds_of(session: Session, store: Any) -> Rounds:
    """The rounds of a session's ranks."""
    from trainer.parallel.gloo_network import lazy_gloo

    contract = session.contract
    if contract.world_size == 1:
        return Rounds(None)
    return Rounds(
        lazy_gloo(
            dist.PrefixStore("rounds/", store),  # type: ignore[attr-defined]  # a re-export
            contract.rank,
            contract.world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
            interface=interface_of(session),
        )
    )


def interface_of(session: Session) -> str:
    """The network interface for gloo; "" for the host's default, which many hosts have on
    loopback."""
    host = session.contract.rendezvous_host
    if host.startswith("127.") or host in ("localhost", "::1"):
        return "lo"
    given = os.environ.get(GLOO_INTERFACE, "").partition(",")[0]
    return given or interface_towards(host)
