"""How much the ranks of a job have written, where their nodes are on this machine.

So the end of their output is known once all of it was shown. Of other nodes it is not: there the
controller ends the output when nothing more has come for a while.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from outlast.worker_contract import ALL_LOGS, log_rank

_ATTEMPT = re.compile(r"a(\d+)")


def written_bytes(nodes: Path, job_id: str) -> Mapping[tuple[int, int], int]:
    """Bytes by attempt and rank, of all that wrote anything; `nodes` has a folder for each node.

    A log of which the agent has cut off the beginning counts with the rest.
    """
    found = {}
    for path in nodes.glob(f"*/jobs/{job_id}/a*/{ALL_LOGS}"):
        attempt, rank = _ATTEMPT.fullmatch(path.parent.name), log_rank(path.name)
        size = path.stat().st_size
        if attempt is not None and rank is not None and size > 0:
            found[int(attempt.group(1)), rank] = size
    return found
