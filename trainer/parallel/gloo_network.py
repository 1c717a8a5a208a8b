"""Backends of gloo: one for each group of a rank, or one for all ranks.

The groups of a rank share a device, which is one thread and one listening socket; torch
adds a thread for each group that stays idle. Groups are connected as they are made, by gloo
itself: a connection that is made at its first message costs that message too, which is more
than the connection. `lazy_gloo` has such connections, for many ranks of which few talk.

What does not belong here: what a group computes (`trainer.parallel.gloo`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # re-exports


class GlooNetwork:
    """One rank's end of its groups.

    `interface` is the network interface, "" for the host's default.
    """

    def __init__(self, store: Store, *, timeout: timedelta, interface: str) -> None:
        self._store = store
        self._timeout = timeout
        self._device = _device(interface, is_lazy=False)

    def join(self, name: str, index: int, size: int) -> Any:
        """The backend of the group called `name` in the store, once all members are connected."""
        addresses = _Addresses(PrefixStore(f"{name}/", self._store), index, size)
        return _backend(addresses, index, size, self._timeout, self._device)


def lazy_gloo(
    store: Store, rank: int, world_size: int, *, timeout: timedelta, interface: str
) -> Any:
    """A backend over all ranks whose connections are made at their first message."""
    return _backend(store, rank, world_size, timeout, _device(interface, is_lazy=True))


class _Addresses(Store):
    """What gloo needs of a store: each member sets its address, and gets those of the others.

    Gloo waits for and gets one at a time, three requests each. Asked for all at once they
    are two requests, whatever their number.
    """

    def __init__(self, store: Store, index: int, size: int) -> None:
        super().__init__()
        self._store = store
        self._others = [member for member in range(size) if member != index]
        self._own: dict[str, bytes] = {}
        self._folder = ""
        self._known: dict[str, bytes] = {}

    # torch's stubs say str; what comes and goes is bytes.
    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._folder = key[: key.rindex("/") + 1]
        self._own[key] = value
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if any(key not in self._known for key in keys):
            others = [f"{self._folder}{member}" for member in self._others]
            self._known = self._own | dict(zip(others, self._store.multi_get(others), strict=True))


def _device(interface: str, *, is_lazy: bool) -> Any:
    # The bindings exist; torch's stubs leave them out.
    gloo: Any = dist.ProcessGroupGloo
    if interface:
        return gloo.create_device(interface=interface, lazy_init=is_lazy)
    return gloo.create_default_device(lazy_init=is_lazy)


def _backend(store: Store, index: int, size: int, timeout: timedelta, device: Any) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # as above
    options._timeout = timeout
    options._threads = 1
    options._devices = [device]
    # A bare backend instead of init_process_group: no registry, no world group's barrier.
    return dist.ProcessGroupGloo(store, index, size, options)
