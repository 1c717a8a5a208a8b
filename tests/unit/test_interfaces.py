"""Which interface has a node's address, and that ranks find each other there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from controller.agent.workers.environment import standby_environment
from outlast.interfaces import interface_of, interface_towards
from outlast.worker_contract import GLOO_INTERFACE
from tests.agent.test_links import ip
from tests.netns.fleet import why_not

IF_INET6 = """\
00000000000000000000000000000001 01 80 10 80       lo
fd00000000000000000000000000002a 02 40 00 80     eth0
"""


def test_loopback_has_the_loopback_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("localhost") == "lo"
    assert interface_towards("127.0.0.1") == "lo"


def test_an_address_that_no_interface_has_is_not_guessed() -> None:
    assert interface_of("192.0.2.7") == ""
    assert interface_of("no-such-host.invalid") == ""
    assert interface_towards("no-such-host.invalid") == ""


def test_ipv6_is_read_from_the_kernels_list(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/if_inet6").write_text(IF_INET6)
    assert interface_of("fd00::2a", tmp_path) == "eth0"
    assert interface_of("fd00::2b", tmp_path) == ""


def test_a_real_device_is_found_by_its_address() -> None:
    if reason := why_not():
        pytest.skip(reason)
    name, network = f"ol{os.getpid()}", f"10.{128 + os.getpid() // 256 % 64}.{os.getpid() % 256}"
    ip("link", "add", name, "type", "veth", "peer", "name", f"{name}f")
    try:
        ip("addr", "add", f"{network}.1/30", "dev", name)
        assert interface_of(f"{network}.1") == name
        assert interface_of(f"{network}.2") == ""
        ip("link", "set", name, "up")
        assert interface_towards(f"{network}.2") == name
    finally:
        ip("link", "del", name)


@pytest.mark.parametrize(
    ("interface", "given", "found"),
    [
        ("eth0", None, "eth0"),
        ("", None, None),
        # Somebody knows better, but not on loopback, where nothing else leads.
        ("eth0", "ib0", "ib0"),
        ("lo", "ib0", "lo"),
    ],
)
def test_gloo_uses_the_interface_with_the_nodes_address(
    interface: str, given: str | None, found: str | None
) -> None:
    environment = {} if given is None else {GLOO_INTERFACE: given}
    assert standby_environment(environment, interface=interface).get(GLOO_INTERFACE) == found
