"""The cable between agents and their controller, which can be cut.

While it is cut, nothing arrives and nothing is refused, as where a switch drops every
packet: both ends live on, and each finds the other silent. What was on its way comes later.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

_CHUNK_BYTES = 1 << 16
# No row lasts so long: a thread that waits for the other end of a cut cable ends with it.
_MOST_S = 600.0


class Cable:
    """Listens at `address` and passes on to wherever `target` says at each new connection."""

    def __init__(self, target: Callable[[], str]) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._whole = threading.Event()
        self._whole.set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        host, port = self._listening.getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        """Take no more connections; those that there are go on to their end."""
        self._listening.close()
        self._whole.set()

    def _accept(self) -> None:
        # Closing the socket is what ends this.
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._whole.wait(_MOST_S)
        host, _, port = self._target().rpartition(":")
        try:
            far = socket.create_connection((host, int(port)), timeout=_MOST_S)
        except OSError:
            near.close()
            return
        for ends in ((near, far), (far, near)):
            threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                self._whole.wait(_MOST_S)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
