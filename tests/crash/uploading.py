"""An uploader in a process of its own: URL, MEMORY, SAVERS and TIMEOUT_S are its arguments.

It uploads and commits what is wanted of rank 0, as an agent does, and ends when nothing is left.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from checkpoint.core.pacing import TransferLimits
from checkpoint.core.retention import RetentionPolicy
from checkpoint.upload.commit import CommitRules
from checkpoint.upload.uploader import Uploader

# One part at a time, so that a count of parts says which.
LIMITS = TransferLimits(memory_bytes=8 << 20)
KEEP = 2


def run_uploader(
    url: str,
    memory: Path,
    num_savers: int,
    timeout_s: float,
    on_trouble: Callable[[int, str, str], None],
) -> None:
    """Upload and commit all that is wanted."""
    rules = CommitRules(retention=RetentionPolicy(keep=KEEP), timeout_s=timeout_s, interval_steps=1)
    uploader = Uploader(
        url,
        "job-1",
        memory,
        (0,),
        range(num_savers),
        True,
        rules,
        lambda committed: None,
        on_trouble,
        limits=LIMITS,
    )
    uploader.start()
    assert uploader.drain(60.0)
    uploader.stop()


def main() -> None:
    url, memory, num_savers, timeout_s = sys.argv[1:]
    run_uploader(url, Path(memory), int(num_savers), float(timeout_s), print)


if __name__ == "__main__":
    main()
