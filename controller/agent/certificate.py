"""This node's own certificate: got with the join token, kept in its folder, renewed in time.

The key is made here and never leaves the node. It stays the same when the certificate is renewed,
so that an answer that is lost changes nothing: the controller knows the node by its key.

A controller that signs none is talked to as before, with the join token alone. So is one for which
the agent was given a certificate by hand, in `tls_dir`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio

from controller import join_token
from controller.access.enrollment import renewal_due_s
from controller.agent.config import AgentConfig
from controller.join_token import JoinTokenError
from outlast import private
from outlast.access import CERTIFICATE_FILE, KEY_FILE, Access, AccessError, read_text
from outlast.channel import open_aio_channel
from outlast.v1 import enrollment_pb2
from outlast.v1.enrollment_pb2_grpc import EnrollmentStub

if TYPE_CHECKING:
    from outlast.v1.enrollment_pb2_grpc import EnrollmentAsyncStub

logger = logging.getLogger(__name__)

FOLDER, PORT_FILE = "certificate", "port"
_ENROLL_S = 5.0
# After a controller has said that it signs none, and after it has given one that leads nowhere.
_DECLINED_S = 600.0
_GRANTED_S = 60.0
# Between two looks at the time: a machine may have been suspended.
_LOOK_S = 60.0
_LEAST_PAUSE_S = 1.0
# Connections with a certificate that fail one after the other, until another one is asked for.
_MOST_FAILED = 3
# Of the lifetime: nodes that have joined at once do not all renew at once.
_SPREAD = 0.05
_CHANNEL_OPTIONS = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))
# The last one for a node's name that a certificate cannot have.
_DECLINED = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
)
# What a connection that is being made comes to.
_DECIDED = (
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
    grpc.ChannelConnectivity.SHUTDOWN,
)
# Of a common name, by X.509.
_MAX_NAME = 64
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
# With these a session with the join token would end as well.
_NOT_LET_IN = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    *_AWAY,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a controller is called now."""

    address: str
    access: Access
    metadata: tuple[tuple[str, str], ...]
    """The join token, where it is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A certificate with its key, and where the controller takes it."""

    certificate: str
    key: str
    port: int
    begins_s: float
    expires_s: float


class NodeCertificate:
    """What one agent shows a controller."""

    def __init__(
        self,
        config: AgentConfig,
        random: Random | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._spread = (random or Random()).uniform(0.0, _SPREAD)
        self._wall_clock = wall_clock
        self._folder = config.state_dir / FOLDER
        self._held: _Held | None = None
        self._is_read = False
        # No connection was made with it: its authority or its port may be another one now.
        self._is_doubted = False
        self._num_failed = 0
        self._declined_until_s = self._granted_until_s = float("-inf")
        self._asking = asyncio.Lock()
        self._got = asyncio.Event()

    def has_failed(self) -> None:
        """The controller was not reached with what `way` gave."""
        self._is_doubted = True
        self._num_failed += 1
        # It may have been started anew, with other options.
        self._declined_until_s = float("-inf")

    def has_worked(self) -> None:
        """The controller was reached with it."""
        self._is_doubted, self._num_failed = False, 0

    async def way(self, address: str) -> Way:
        """How to call the controller at `address`; a certificate is got first if one can be.

        Raises:
            AccessError: a file of `tls_dir`, or the key, cannot be used.
            JoinTokenError: the file of the join token cannot be used.
            grpc.aio.AioRpcError: the controller is not there, or does not let this node in.
        """
        config = self._config
        if self._is_wanted():
            async with self._asking:
                held = await self._held_for(address)
            if held is not None and not self._is_declined():
                own = replace(config.access, certificate=held.certificate, key=held.key)
                return Way(address=_at_port(address, held.port), access=own, metadata=())
        shown = join_token.metadata(config.join_token_file)
        return Way(address=address, access=config.access, metadata=shown)

    async def run(self, address: Callable[[], str]) -> None:
        """Renew it in time, until the task is cancelled; `address` says who is asked."""
        pause_s = 0.0
        while True:
            self._got.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._got.wait()
            pause_s = self._pause_s()
            held = self._valid() if self._is_wanted() and not self._is_declined() else None
            if held is None or self._wall_clock() < self._due_s(held):
                continue
            try:
                async with self._asking:
                    is_renewed = await self._renew(address(), held)
                pause_s = pause_s if is_renewed else _retry_s(held)
            except (grpc.aio.AioRpcError, AccessError, JoinTokenError) as error:
                why = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                logger.warning("certificate not renewed: node=%s %s", self._config.node, why)
                pause_s = _retry_s(held)

    def _is_wanted(self) -> bool:
        """Whether this agent needs one: it has none from an operator, and is not the controller's
        own, which finds its controller by a file."""
        config = self._config
        if config.tls_dir is None or config.controller_file is not None:
            return False
        if len(config.node) > _MAX_NAME:
            return False
        return not (config.tls_dir / CERTIFICATE_FILE).exists()

    def _is_declined(self) -> bool:
        return time.monotonic() < self._declined_until_s

    async def _held_for(self, address: str) -> _Held | None:
        """What to show the controller at `address`; got with the join token where what is held
        does not lead there."""
        held = self._valid()
        if self._config.join_token_file is None or self._is_declined():
            return held
        if held is not None:
            is_new = time.monotonic() < self._granted_until_s
            if not self._is_doubted or is_new or await self._leads(address, held):
                return held
        if await self._get(address, held):
            self._granted_until_s = time.monotonic() + _GRANTED_S
        return self._valid()

    async def _leads(self, address: str, held: _Held) -> bool:
        """Whether somebody answers a certificate: a controller that was away needs no new one."""
        if self._num_failed > _MOST_FAILED:
            return False
        own = replace(self._config.access, certificate=held.certificate, key=held.key)
        at = _at_port(address, held.port)
        async with open_aio_channel(at, own, _CHANNEL_OPTIONS) as channel:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENROLL_S):
                    state = channel.get_state(try_to_connect=True)
                    while state not in _DECIDED:
                        await channel.wait_for_state_change(state)
                        state = channel.get_state()
                    return state is grpc.ChannelConnectivity.READY
        return False

    def _valid(self) -> _Held | None:
        """What is held, while it has not expired."""
        if not self._is_read:
            self._is_read = True
            self._held = self._read()
        held = self._held
        return held if held is not None and self._wall_clock() < held.expires_s else None

    def _due_s(self, held: _Held) -> float:
        return renewal_due_s(held.begins_s, held.expires_s, self._spread)

    def _pause_s(self) -> float:
        held = self._valid() if self._is_wanted() else None
        return _LOOK_S if held is None else _pause(self._due_s(held) - self._wall_clock())

    async def _get(self, address: str, held: _Held | None) -> bool:
        """With the join token; one that holds stays where none is given. Whether one was."""
        config = self._config
        try:
            shown = join_token.metadata(config.join_token_file)
            await self._enroll(address, config.access, shown)
            return True
        except JoinTokenError:
            if held is None:
                raise
        except grpc.aio.AioRpcError as error:
            if error.code() in _DECLINED:
                self._declined_until_s = time.monotonic() + _DECLINED_S
                logger.info("no certificate is given: %s", error.details())
                return False
            if held is None and error.code() in _NOT_LET_IN:
                raise
            # Of a controller that is away the session says so.
            log = logger.debug if error.code() in _AWAY else logger.warning
            log("no certificate: node=%s %s", config.node, error.details())
        return False

    async def _renew(self, address: str, held: _Held) -> bool:
        """With the certificate itself; with the join token where it is not on record any more.
        Whether there is a new one."""
        own = replace(self._config.access, certificate=held.certificate, key=held.key)
        try:
            await self._enroll(_at_port(address, held.port), own, ())
            return True
        except grpc.aio.AioRpcError as error:
            is_refused = error.code() is grpc.StatusCode.PERMISSION_DENIED
            if not is_refused or self._config.join_token_file is None:
                raise
            return await self._get(address, held)

    async def _enroll(
        self, address: str, access: Access, shown: tuple[tuple[str, str], ...]
    ) -> None:
        # It takes a while to import, and only agents that encrypt need it.
        from controller.agent.certificate_files import key_in, signing_request

        node, key = self._config.node, key_in(self._folder / KEY_FILE)
        request = enrollment_pb2.EnrollRequest(
            node_id=node, signing_request=signing_request(key, node)
        )
        async with open_aio_channel(address, access, _CHANNEL_OPTIONS) as channel:
            stub = cast("EnrollmentAsyncStub", EnrollmentStub(channel))
            answer = await stub.Enroll(request, metadata=shown, timeout=_ENROLL_S)
        try:
            private.replace_bytes(self._folder / PORT_FILE, str(answer.port).encode())
            private.replace_bytes(self._folder / CERTIFICATE_FILE, answer.certificate.encode())
        except OSError as error:
            why = error.strerror or error
            raise AccessError(f"{self._folder} cannot be written: {why}") from error
        self._held = self._read()
        self.has_worked()
        self._got.set()
        logger.info("certificate: node=%s port=%d", node, answer.port)

    def _read(self) -> _Held | None:
        """What is in the folder; None when nothing that can be used is."""
        from controller.agent.certificate_files import span_of

        if not (self._folder / CERTIFICATE_FILE).exists():
            return None
        try:
            certificate = read_text(self._folder / CERTIFICATE_FILE)
            key = read_text(self._folder / KEY_FILE)
            port = int(read_text(self._folder / PORT_FILE))
            begins_s, expires_s = span_of(certificate, key)
        except (AccessError, ValueError) as error:
            logger.warning("%s is not used: %s", self._folder, error)
            return None
        return _Held(
            certificate=certificate, key=key, port=port, begins_s=begins_s, expires_s=expires_s
        )


def _retry_s(held: _Held) -> float:
    """After a renewal that failed."""
    return _pause((held.expires_s - held.begins_s) / 60)


def _pause(wanted_s: float) -> float:
    return min(max(wanted_s, _LEAST_PAUSE_S), _LOOK_S)


def _at_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"
