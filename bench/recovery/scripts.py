"""A rank of a script is struck under Outlast: as torchrun runs it, and with a session."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.recovery.launched import PARTS, Event, Journal, row
from bench.recovery.setting import wait_for
from outlast.client import Client
from outlast.spec import JobSpec

_ROOT = Path(__file__).parents[2]
MODULES = {
    "run": "bench.baselines.torchrun_train",
    "session": "bench.baselines.session_train",
}


def strike_script(
    client: Client, kind: str, spec: JobSpec, folder: Path, how: signal.Signals
) -> dict[str, Any]:
    """Send `how` to a rank; the row of its recovery. `kind` is one of `MODULES`."""
    folder.mkdir(parents=True)
    journal = Journal(folder / "events.jsonl")
    with _running(client, kind, spec, folder, journal) as job_id:
        pid = wait_for(journal.victim, f"first steps of {kind}")
        # Limits for a rank that stands are learned from steps.
        step_s = _step_s(journal.read())
        struck_s = time.time()
        os.kill(pid, how)
        before = journal.read()
        after = wait_for(lambda: journal.recovered(before), f"next step of {kind}")
        incident = wait_for(lambda: next(iter(client.incidents(job_id)), None), "the incident")
    found = row(kind, PARTS, struck_s, before, after)
    return {
        **found,
        "signal": how.name,
        "step_s": step_s,
        "detect_s": incident.opened_s - struck_s,
    }


def _step_s(events: list[Event]) -> float:
    """How long a step takes, first ones left out."""
    ends = [each["at_s"] for each in events if each["event"] == "step" and each["rank"] == 0][5:]
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


@contextmanager
def _running(
    client: Client, kind: str, spec: JobSpec, folder: Path, journal: Journal
) -> Iterator[str]:
    memory = Path(tempfile.mkdtemp(prefix="outlast-bench-", dir="/dev/shm"))
    (folder / "spec.json").write_text(spec.canonical_json())
    document = {
        "name": f"recovery-{kind}",
        "workload": {
            "command": ["python", "-m", MODULES[kind]],
            "working_dir": str(_ROOT),
            "workers_per_node": 2,
            # torch's optimizers import it when the first is made, which takes seconds.
            "preload": ["torch", "torch._dynamo"],
            "env": {
                "EVENTS": str(journal.path),
                "SPEC": str(folder / "spec.json"),
                "CHECKPOINT": str(memory / "checkpoint.pt"),
            },
        },
        "checkpoint": {"storage_interval_steps": 1_000_000},
    }
    job_id = client.submit(document).job_id
    try:
        yield job_id
    finally:
        client.cancel(job_id)
        wait_for(lambda: client.get(job_id)[0].state == "CANCELLED", "the job's end")
        shutil.rmtree(memory)
