"""A job's curve as a run of Weights & Biases, with its server or without."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from outlast.tracking.points import News
from outlast.tracking.run_files import held_in, runs_of, settle

# What the files of runs held when they were last looked at: they may be deleted once sent.
NOTE = "outlast-track.json"
# W&B's process writes on for a moment when a run is ended.
_FLUSH_S = 10.0
_POLL_S = 0.05


class WandB:
    """The run with the job's id; a tracker that is started again goes on with it.

    What was written is what W&B has: a server says with which step its run goes on, and without
    one the files of runs are read. What a process had not sent, or not written to its file,
    when it was killed is logged again.

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
        self._job_id = job_id
        self._offline = offline
        # Online runs have files, too, and what of these was sent only the server can say.
        kept = [settle(path) for path in runs_of(folder, job_id, offline_only=not offline)]
        self.last_step = max(kept, default=0)
        if offline:
            self.last_step = self._keep(self.last_step)
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
        if not offline and self._run.resumed:
            # The step that comes next.
            self.last_step = max(self.last_step, self._run.step - 1)

    def write(self, news: News) -> None:
        """Add points."""
        for point in news.points:
            if point.step > self.last_step:
                # Whole at once: nothing else is logged of this step.
                self._run.log(dict(point.values), step=point.step, commit=True)
                self.last_step = point.step

    def close(self) -> None:
        """End the run; without a server all of it is in its file then."""
        path = Path(self._run.dir).parent / f"run-{self._job_id}.wandb"
        self._run.finish()
        if self._offline:
            deadline = time.monotonic() + _FLUSH_S
            while not (held := held_in(path.read_bytes())).is_finished:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_S)
            self._keep(held.last_step)

    def _keep(self, step: int) -> int:
        """Note that files have all up to a step; up to which they ever had."""
        notes = json.loads(self._note.read_text()) if self._note.exists() else {}
        last = max(step, int(notes.get(self._job_id, 0)))
        fresh = self._note.with_suffix(".tmp")
        fresh.write_text(json.dumps({**notes, self._job_id: last}))
        fresh.replace(self._note)
        return last
