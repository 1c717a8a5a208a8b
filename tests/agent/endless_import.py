"""A module whose import never ends, like one on a file system that hangs."""

from __future__ import annotations

import signal

signal.pause()
