"""Where an agent finds its controller."""

from __future__ import annotations

import json
import logging

from controller.agent.config import AgentConfig

logger = logging.getLogger(__name__)


def controller_address(config: AgentConfig) -> str:
    """host:port of the controller now: it may have come back on another port."""
    path = config.controller_file
    if path is not None:
        try:
            address = json.loads(path.read_text())["grpc"]
        # It may be missing or half written while the controller starts.
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("controller file %s: %r", path, error)
        else:
            return str(address)
    return config.controller
