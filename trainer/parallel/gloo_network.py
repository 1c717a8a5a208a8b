"""The connections of one rank over gloo, which all of its groups share.

A gloo backend for each group would cost a thread, a rendezvous and a connection to
each member, also where two ranks share several groups. One backend over all ranks,
whose connections are made at their first message, needs one of each, and none to
ranks that share no group: a job of thousands pays for its few neighbours. Groups are
told apart by their tags.

What does not belong here: what a group computes (`trainer.parallel.gloo`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # re-exports

from outlast.blackbox import Group
from trainer.parallel.comm import Pending

# A group's tags lie below this; gloo takes 31 bits, which leaves room for 32 groups.
_TAGS_PER_GROUP = 1 << 26


class GlooNetwork:
    """One rank's end; nothing is connected before `connect`.

    `interface` is the network interface, "" for the host's default.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, timeout: timedelta, interface: str
    ) -> None:
        self._rank = rank
        self._peers: set[int] = set()
        # The backend keeps only the C++ half of it alive, and not the store behind it.
        self._addresses = _Addresses(PrefixStore("gloo/", store), timeout)
        self.backend = lazy_gloo(
            self._addresses, rank, world_size, timeout=timeout, interface=interface
        )

    def group(self, group: Group, ranks: Sequence[int]) -> GroupBackend:
        """The backend of one of this rank's groups, of which there is one of each kind."""
        self._peers |= set(ranks) - {self._rank}
        return GroupBackend(self, tuple(ranks), group * _TAGS_PER_GROUP)

    def connect(self) -> None:
        """Return once this rank can reach every member of its groups.

        A first message, which goes one way, waits for the other end to begin too. All
        ranks take their peers in ascending order, so the pairs are made in one order
        everywhere.
        """
        self._addresses.fetch(sorted(self._peers))
        message = torch.zeros(1)
        works = [
            self.backend.recv([message], peer, 0)
            if peer < self._rank
            else self.backend.send([message], peer, 0)
            for peer in sorted(self._peers)
        ]
        for work in works:
            work.wait()


class _Addresses(Store):
    """What gloo needs of a store: each rank sets its address, and gets those of its peers.

    Gloo waits for and gets one at a time, three requests each. Asked for all at once they
    are two requests, whatever their number.
    """

    def __init__(self, store: Store, timeout: timedelta) -> None:
        super().__init__()
        self._store = store
        self._timeout = timeout
        self._folder = ""
        self._known: dict[str, bytes] = {}

    def fetch(self, ranks: Sequence[int]) -> None:
        """Return once the addresses of these ranks are known."""
        keys = [f"{self._folder}{rank}" for rank in ranks]
        if keys:
            self._known |= zip(keys, self._store.multi_get(keys), strict=True)

    # torch's stubs say str; what comes and goes is bytes.
    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._folder = key[: key.rindex("/") + 1]
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._known.get(key) or self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        missing = [key for key in keys if key not in self._known]
        if missing:
            self._store.wait(missing, timeout or self._timeout)


class GroupBackend:
    """A group's share of the network: its members by index, and tags of its own."""

    def __init__(self, network: GlooNetwork, ranks: tuple[int, ...], first_tag: int) -> None:
        self._network = network
        self._backend = network.backend
        self._ranks = ranks
        self._first_tag = first_tag

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Pending:
        """Start to send to the member at index `peer`."""
        work: Pending = self._backend.send(tensors, self._ranks[peer], self._first_tag + tag)
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Pending:
        """Start to receive from the member at index `peer`."""
        work: Pending = self._backend.recv(tensors, self._ranks[peer], self._first_tag + tag)
        return work


def lazy_gloo(
    store: Store, rank: int, world_size: int, *, timeout: timedelta, interface: str
) -> Any:
    """A backend over all ranks whose connections are made at their first message."""
    # The bindings exist; torch's stubs leave them out.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = 1
    options._devices = [
        dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=True)
        if interface
        else dist.ProcessGroupGloo.create_default_device(lazy_init=True)
    ]
    # A bare backend instead of init_process_group: no registry, no world group's barrier.
    return dist.ProcessGroupGloo(store, rank, world_size, options)
