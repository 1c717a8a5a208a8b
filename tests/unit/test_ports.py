"""Ports for servers that are started with a number."""

import socket
from pathlib import Path

import pytest

from outlast import ports


def test_no_outgoing_connection_is_given_one() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = ports.free_ports(20)
    assert len(set(found)) == 20
    assert not [port for port in found if lowest <= port <= highest]


def test_a_port_that_somebody_has_is_not_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = ports.free_ports(2)
    monkeypatch.setattr(ports, "_candidates", lambda lowest, highest: [taken, free])
    with socket.create_server(("127.0.0.1", taken)):
        assert ports.free_ports(1) == [free]
        with pytest.raises(OSError, match=r"2 free ports of .* are needed, 1 were found"):
            ports.free_ports(2)


@pytest.mark.parametrize(
    ("lowest", "highest", "expected"),
    [
        (32_768, 60_999, range(10_000, 32_768)),
        (1_024, 40_000, range(40_001, 65_536)),
        # Where the kernel may hand out all of them, any will do.
        (1_024, 65_535, range(10_000, 65_536)),
    ],
)
def test_they_are_taken_from_beside_the_kernels_range(
    lowest: int, highest: int, expected: range
) -> None:
    assert ports._candidates(lowest, highest) == expected
