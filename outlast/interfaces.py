"""Which network interface has an address, as the kernel tells it."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

# Of `ioctl` (netdevice(7)): the IPv4 address of an interface. Its name comes first, then a
# `sockaddr`.
_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("16s4x4s16x")


def interface_of(address: str, root: Path = Path("/")) -> str:
    """The interface with this IP address or host name; "" where none has it, or it is not known.

    `root` is where /proc is, which lists the addresses of IPv6.
    """
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    wanted = {(int(family), str(where[0])) for family, _, _, _, where in found}
    known = dict(_addresses(root))
    return next((known[each] for each in sorted(wanted & known.keys())), "")


def interface_towards(host: str) -> str:
    """The interface over which this host reaches another one, or itself; "" where that is not
    known."""
    try:
        family, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            # Nothing is sent: the kernel says which address it would be from.
            asked.connect(where)
            return interface_of(str(asked.getsockname()[0]))
    except OSError:
        return ""


def _addresses(root: Path) -> Iterator[tuple[tuple[int, str], str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = _IFREQ.pack(name.encode(), bytes(4))
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, request)
            except OSError:
                # It has none.
                continue
            _, raw = _IFREQ.unpack(answer)
            yield (socket.AF_INET, socket.inet_ntop(socket.AF_INET, raw)), name
    try:
        lines = (root / "proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        digits, *_, name = line.split()
        text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        yield (socket.AF_INET6, text), name
