"""gRPC channels to a controller, with what proves who calls."""

from __future__ import annotations

import ipaddress
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio

from outlast.access import Access, AccessError
from outlast.addresses import addresses_of
from outlast.oidc.renewal import fresh

# How a token travels, that of a caller and that of a node.
HEADER = "authorization"
SCHEME = "Bearer "
_Options = Sequence[tuple[str, Any]]
# In which one of several controllers takes a connection; none that waits for another one does.
_READY_S = 2.0
_DECIDED = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
_FOR_CLIENTS: _Options = (
    ("grpc.max_receive_message_length", 256 * 2**20),
    # Errors travel in what gRPC calls metadata, and a bad spec may have many.
    ("grpc.max_metadata_size", 2**20),
    ("grpc.absolute_max_metadata_size", 2**20),
    ("grpc.enable_retries", 0),
)


def bearer(token: str) -> str:
    """A token as the value of the header."""
    return f"{SCHEME}{token}"


def open_channel(address: str, access: Access) -> grpc.Channel:
    """A channel for the calls of clients, which block; of several addresses, to one that answers.

    Raises:
        AccessError: the token would travel in clear text through a network.
    """
    *others, last = addresses_of(address)
    for each in others:
        channel = _open(each, access)
        if _is_answered(channel):
            return _with_token(channel, access)
        channel.close()
    return _with_token(_open(last, access), access)


def _is_answered(channel: grpc.Channel) -> bool:
    """Whether a controller takes the connection; one that is frozen says neither yes nor no."""
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    note = states.put
    channel.subscribe(note, try_to_connect=True)
    deadline_s = time.monotonic() + _READY_S
    try:
        while True:
            state = states.get(timeout=max(0.0, deadline_s - time.monotonic()))
            if state in _DECIDED:
                return state is grpc.ChannelConnectivity.READY
    except queue.Empty:
        return False
    finally:
        channel.unsubscribe(note)


def refuse_clear_text(address: str, access: Access) -> None:
    """Raises:
    AccessError: a token would travel in clear text through a network.
    """
    hosts = [each.rpartition(":")[0] for each in addresses_of(address)]
    if not access.ca and not all(map(is_loopback, hosts)):
        raise AccessError(
            f"the token for {address} is not sent in clear text; log in with --ca, the "
            "certificate of the controller's authority"
        )


def _open(address: str, access: Access) -> grpc.Channel:
    if access.token:
        refuse_clear_text(address, access)
    if not access.ca:
        return grpc.insecure_channel(address, options=_FOR_CLIENTS)
    return grpc.secure_channel(address, _credentials(access), options=_FOR_CLIENTS)


def _with_token(channel: grpc.Channel, access: Access) -> grpc.Channel:
    return grpc.intercept_channel(channel, _Bearer(access)) if access.token else channel


def open_aio_channel(address: str, access: Access, options: _Options) -> grpc.aio.Channel:
    """A channel for calls in an event loop, which bring their tokens themselves."""
    if not access.ca:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _credentials(access), options=options)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, as far as its name says so."""
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _credentials(access: Access) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        access.ca.encode(),
        access.key.encode() if access.key else None,
        access.certificate.encode() if access.certificate else None,
    )


class _Details(NamedTuple):
    """What gRPC asks of the details that an interceptor hands on."""

    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class _Bearer(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]  # generic in its stubs only
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[type-arg]
):
    """Adds the token to each call: gRPC's own call credentials refuse to on the loopback."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._renewing = threading.Lock()

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        token = self._token()
        call = continuation(_with_header(details, token), request)
        if self._access.session is None or call.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return call
        # The controller's clock, or the issuer's, is not this one.
        return continuation(_with_header(details, self._token(refused=token)), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_with_header(details, self._token()), request)

    def intercept_stream_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_with_header(details, self._token()), request)

    def _token(self, refused: str = "") -> str:
        with self._renewing:
            self._access = fresh(self._access, refused=refused)
            return self._access.token


def _with_header(details: Any, token: str) -> _Details:
    return _Details(
        method=details.method,
        timeout=details.timeout,
        metadata=[*(details.metadata or ()), (HEADER, bearer(token))],
        credentials=details.credentials,
        wait_for_ready=details.wait_for_ready,
        compression=details.compression,
    )
