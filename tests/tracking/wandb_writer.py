"""A tracker to be killed: `python -m tests.tracking.wandb_writer FOLDER LAST`.

It goes on with a run offline, prints each step once it is logged, and ends behind the last one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from outlast.tracking.points import Curve
from outlast.tracking.wandb import WandB
from tests.tracking.test_points import report

JOB = "job-1"


def main(folder: str, last: int) -> None:
    tracker = WandB(Path(folder), project="tests", job_id=JOB, spec={}, offline=True)
    curve = Curve(last_step=tracker.last_step)
    print("from", tracker.last_step, flush=True)
    for step in range(1, last + 1):
        tracker.write(curve.take([report(step, float(step))]))
        print(step, flush=True)
    tracker.close()
    print("closed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
