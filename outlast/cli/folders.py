"""Where things are on this machine unless a command says otherwise."""

from __future__ import annotations

from pathlib import Path

DEFAULT_STATE_DIR = Path("~/.local/state/outlast")
