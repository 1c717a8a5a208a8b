"""gRPC channels to a controller, with what proves who calls."""

from __future__ import annotations

import ipaddress
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from outlast.access import Access, AccessError, read_text
from outlast.addresses import addresses_of
from outlast.errors import OutlastError, RetryableError
from outlast.oidc.renewal import INTERRUPTED_S, fresh

# How a token travels, that of a caller and that of a node.
HEADER = "authorization"
SCHEME = "Bearer "
_Options = Sequence[tuple[str, Any]]
# In which one of several controllers takes a connection; none that waits for another one does.
_READY_S = 2.0
_DECIDED = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
# While a stream is open, between two looks at its token, which is renewed 10 s before its end.
_LOOK_S = 3.0
# At most, where it cannot be renewed.
_MOST_PAUSE_S = 60.0
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


def open_channel(address: str, access: Access, bearer: Bearer | None = None) -> grpc.Channel:
    """A channel for the calls of clients, which block; of several addresses, to one that answers.

    `bearer` has what `access` has, and shows the token; one of its own unless given.

    Raises:
        AccessError: the token would travel in clear text through a network.
    """
    *others, last = addresses_of(address)
    shows = bearer or Bearer(access)
    for each in others:
        channel = _open(each, access)
        if _is_answered(channel):
            return _with_token(channel, shows)
        channel.close()
    return _with_token(_open(last, access), shows)


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


def _with_token(channel: grpc.Channel, bearer: Bearer) -> grpc.Channel:
    return grpc.intercept_channel(channel, bearer) if bearer.has_token else channel


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


class Bearer(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]  # generic in its stubs only
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[type-arg]
):
    """Adds the token to each call: gRPC's own call credentials refuse to on the loopback."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._renewing = threading.Lock()
        # Threads that send the token again once it is renewed, with the event that ends each.
        self._showing: dict[threading.Thread, threading.Event] = {}

    @property
    def has_token(self) -> bool:
        """Whether there is anything to show."""
        return bool(self._access.token)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        token = self.token()
        call = continuation(_with_header(details, token), request)
        if self._access.session is None or call.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return call
        # The controller's clock, or the issuer's, is not this one.
        return continuation(_with_header(details, self.token(refused=token)), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_with_header(details, self.token()), request)

    def intercept_stream_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(_with_header(details, self.token()), request)

    def token(self, refused: str = "") -> str:
        """The one that holds now.

        Raises:
            OutlastError: it cannot be renewed.
        """
        with self._renewing:
            if self._access.token_file:
                self._access = _read_again(self._access)
            self._access = fresh(self._access, refused=refused)
            return self._access.token

    @contextmanager
    def shown_again(self, show: Callable[[], object]) -> Iterator[None]:
        """Call `show` whenever the token has been replaced meanwhile: a stream that began with it
        goes on while a newer one of its caller is known to the controller."""
        if self._access.session is None and not self._access.token_file:
            yield
            return
        is_over = threading.Event()
        thread = threading.Thread(
            target=self._show, args=(show, self.token(), is_over), name="renewal", daemon=True
        )
        self._showing[thread] = is_over
        thread.start()
        try:
            yield
        finally:
            self._end(thread)

    def close(self) -> None:
        """Renew nothing any more; a channel that is closed takes no calls."""
        for thread in list(self._showing):
            self._end(thread)

    def _end(self, thread: threading.Thread) -> None:
        if (is_over := self._showing.pop(thread, None)) is not None:
            is_over.set()
            # An answer that is under way may have the next refresh token.
            thread.join(INTERRUPTED_S)

    def _show(self, show: Callable[[], object], shown: str, is_over: threading.Event) -> None:
        pause_s = _LOOK_S
        while not is_over.wait(pause_s):
            try:
                token = self.token()
                if token != shown and not is_over.is_set():
                    show()
                    shown = token
            except RetryableError:
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            except OutlastError:
                # What is wrong with the login, the stream's end says.
                return
            else:
                pause_s = _LOOK_S


def _read_again(access: Access) -> Access:
    """With what the file of the token has now; while it is being written, what it had before."""
    try:
        token = read_text(Path(access.token_file)).strip()
    except AccessError:
        return access
    return replace(access, token=token) if token else access


def _with_header(details: Any, token: str) -> _Details:
    return _Details(
        method=details.method,
        timeout=details.timeout,
        metadata=[*(details.metadata or ()), (HEADER, bearer(token))],
        credentials=details.credentials,
        wait_for_ready=details.wait_for_ready,
        compression=details.compression,
    )
