"""Where an agent finds its controller."""

from __future__ import annotations

import json
import logging

from controller.agent.certificate import NodeCertificate, Way
from controller.agent.config import AgentConfig

logger = logging.getLogger(__name__)


class Controllers:
    """Where the controller may be; one of several leads, and the others do not answer."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._turn = 0
        self._certificate = NodeCertificate(config)

    def address(self) -> str:
        """host:port of the one that is asked now: it may have come back on another port."""
        path = self._config.controller_file
        if path is not None:
            try:
                address = json.loads(path.read_text())["grpc"]
            # It may be missing or half written while the controller starts.
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.debug("controller file %s: %r", path, error)
            else:
                return str(address)
        addresses = self._config.controller_addresses
        return addresses[self._turn % len(addresses)]

    def has_failed(self) -> None:
        """That one did not answer: the next one is asked."""
        self._turn += 1
        self._certificate.has_failed()

    def has_answered(self) -> None:
        """That one has welcomed this node."""
        self._certificate.has_worked()

    async def way(self, address: str) -> Way:
        """With what the one at `address` is called now, and on which port; see `NodeCertificate`
        for what it raises."""
        return await self._certificate.way(address)

    async def keep_certificate(self) -> None:
        """Renew this node's certificate in time, until the task is cancelled."""
        await self._certificate.run(self.address)
