"""The end of what copies host memory elsewhere, as the agent ends."""

from __future__ import annotations

import asyncio
import logging

from controller.agent.memory.replicas import Replicas
from controller.agent.memory.uploads import Uploads

logger = logging.getLogger(__name__)


async def end_copies(uploads: Uploads, replicas: Replicas, timeout_s: float) -> None:
    """Stop uploads and copies on other nodes; one that does not stop in time is left."""
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(uploads.stop(), replicas.stop())
    except TimeoutError:
        logger.warning("an upload did not stop within %.0f s; it is abandoned", timeout_s)
