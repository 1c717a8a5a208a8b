"""Threads of the node agent that work beside training."""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)

# Nicer starves beside training that takes every core (measured at 19: 10 s for 90 MB).
_NICE = 10


def give_way_to_training() -> None:
    """Lower this thread's priority; where that is refused it works all the same."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    except OSError as error:
        logger.warning("thread %s keeps its priority: %s", threading.current_thread().name, error)
