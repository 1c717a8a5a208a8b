"""Where the controller listens, and what it means when others can reach it."""

from __future__ import annotations

import ipaddress
import logging
import socket

from outlast.errors import FatalError

logger = logging.getLogger(__name__)

DEFAULT_GRPC = "127.0.0.1:7070"
DEFAULT_HTTP = "127.0.0.1:7071"


class PortTakenError(FatalError):
    """The address cannot be listened on."""


def parse_address(address: str, option: str) -> tuple[str, int]:
    """Host and port of `host:port`; ValueError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{option} is {address!r}; it must be host:port, such as {DEFAULT_GRPC}")
    return host.strip("[]"), int(port)


def bind_http(address: str) -> socket.socket:
    """A socket that listens at `address`.

    Raises:
        PortTakenError: it cannot be listened on.
    """
    host, port = parse_address(address, "--http")
    return _listen(host, port, "--http")


def check_free(host: str, port: int, option: str) -> None:
    """PortTakenError, with the reason, where nobody could listen."""
    _listen(host, port, option).close()


def _listen(host: str, port: int, option: str) -> socket.socket:
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(target[:2], family=family)
    except OSError as error:
        raise PortTakenError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            f"choose another address with {option}"
        ) from error


def name_of(listening: socket.socket) -> str:
    """Its host:port."""
    host, port = listening.getsockname()[:2]
    return f"{host}:{port}"


def warn_if_open(address: str, option: str, *, has_token: bool) -> None:
    """Say what it means when others than this machine can connect: clients are not asked."""
    host, _ = parse_address(address, option)
    try:
        if ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        if host == "localhost":
            return
    logger.warning(
        "%s is %s: everyone who can reach this port can submit jobs, and so run programs on every "
        "node, as the user of the agents; there is no authentication of clients yet. Let only "
        "agents and clients reach it (a firewall, or deploy/kubernetes/network.yaml), or listen "
        "on 127.0.0.1",
        option,
        address,
    )
    if not has_token:
        logger.warning(
            "everyone who can reach %s can join as a node, too, and is given jobs with what is in "
            "their specs; give a --join-token-file that agents must show",
            address,
        )
