"""An entry point whose import leaves a thread behind, as careless libraries do."""

from __future__ import annotations

import threading
from typing import Any

_thread = threading.Thread(target=threading.Event().wait, daemon=True)
_thread.start()


def run(assignment: dict[str, Any]) -> int:
    return 0
