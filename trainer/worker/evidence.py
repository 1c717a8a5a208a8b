"""What a worker does while it is well, so that others can see where it hangs.

The agent looks from outside (`controller.agent.workers.stacks`), whatever the main thread hangs in.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from outlast.worker_contract import flight_recorder

# Set by an earlier attempt of this process.
_ours: dict[str, str] = {}
# Of <sys/prctl.h>.
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def allow_stack_dumps() -> None:
    """Let any process of the same user read this one's stacks.

    Where Yama restricts ptrace to ancestors, the agent's py-spy is none. Kernels without
    Yama refuse this call and need none.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def arm_flight_recorder(folder: Path) -> None:
    """Have NCCL groups made from now on record into `folder`; what the user has set stays."""
    for name, value in flight_recorder(folder).items():
        if os.environ.get(name) in (None, _ours.get(name)):
            os.environ[name] = _ours[name] = value
