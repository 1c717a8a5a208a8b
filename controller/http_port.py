"""The HTTP port of one controller: its own from before it leads, where it may have to wait."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from controller.access.tls import ServerTls
from controller.addresses import PortTakenError, bind_http, name_of
from controller.options import Options
from controller.web.standby import Standby

logger = logging.getLogger(__name__)


class HttpPort:
    """Bound once; given back by `close`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._listening: socket.socket | None = None
        self._standby: Standby | None = None

    def bind(self) -> socket.socket:
        """The socket, which listens from now on.

        Raises:
            PortTakenError: it cannot.
        """
        if self._listening is None:
            self._listening = bind_http(self._options.http)
        return self._listening

    def begin_standby(self) -> None:
        """Answer probes while this controller does not lead.

        Where the port is taken, as by the controller of this machine that leads now, it is bound
        when this one leads.

        Raises:
            TlsError: the certificate cannot be used.
            PortTakenError: nobody could listen there.
        """
        folder = self._options.tls_dir
        tls = None if folder is None else ServerTls(folder)
        try:
            listening = self.bind()
        except PortTakenError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
            logger.warning("%s; no probe is answered until this controller leads", error)
            return
        self._standby = Standby(listening, tls=tls, is_open=self._options.is_http_open)
        logger.info("probes are answered: http=%s", name_of(listening))

    def waits_for(self, whom: str) -> None:
        """Another controller leads."""
        if self._standby is not None:
            self._standby.waits_for(whom)

    def takes_over(self) -> None:
        """No other controller leads any more."""
        if self._standby is not None:
            self._standby.takes_over()

    async def end_standby(self) -> None:
        """Leave the port to the full server; who connects meanwhile waits for that one."""
        if self._standby is not None:
            await asyncio.to_thread(self._standby.close)

    def close(self) -> None:
        """Give the port back."""
        if self._standby is not None:
            self._standby.close()
        if self._listening is not None:
            self._listening.close()
