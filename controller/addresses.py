"""Where the controller listens, and what it means when others can reach it."""

from __future__ import annotations

import socket

from outlast.errors import FatalError

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


def reachable(address: str) -> str:
    """An address to call instead of one that is listened on: every interface has the loopback."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": f"127.0.0.1:{port}", "[::]": f"[::1]:{port}", "::": f"[::1]:{port}"}.get(
        host, address
    )


def name_of(listening: socket.socket) -> str:
    """Its host:port."""
    host, port = listening.getsockname()[:2]
    return f"{host}:{port}"
