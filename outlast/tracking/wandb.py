"""A job's curve as a run of Weights & Biases, with its server or without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outlast.tracking.points import News

# Without its server a run cannot be asked what it has.
NOTE = "outlast-track.json"


class WandB:
    """The run with the job's id; a tracker that is started again goes on with it.

    A run takes steps in ascending order only, so where a job went on from an earlier step with
    other batches, it keeps what it had, and takes what comes after that.
    """

    def __init__(
        self, folder: Path, *, project: str, job_id: str, spec: dict[str, Any], offline: bool
    ) -> None:
        """Raises ModuleNotFoundError: wandb is not installed."""
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._note = folder / NOTE
        notes = json.loads(self._note.read_text()) if self._note.exists() else {}
        self.last_step = int(notes.get(job_id, 0))
        self._job_id = job_id
        self._run: Any = wandb.init(
            project=project,
            id=job_id,
            name=job_id,
            config=spec,
            dir=str(folder),
            resume="allow",
            mode="offline" if offline else "online",
            settings=wandb.Settings(
                silent=True,
                # What uses the machine that this runs on says nothing of the job.
                x_disable_stats=True,
                console="off",
            ),
        )

    def write(self, news: News) -> None:
        """Add points."""
        for point in news.points:
            if point.step > self.last_step:
                self._run.log(dict(point.values), step=point.step)
                self.last_step = point.step
        self._keep()

    def close(self) -> None:
        self._run.finish()

    def _keep(self) -> None:
        notes = json.loads(self._note.read_text()) if self._note.exists() else {}
        fresh = self._note.with_suffix(".tmp")
        fresh.write_text(json.dumps({**notes, self._job_id: self.last_step}))
        fresh.replace(self._note)
