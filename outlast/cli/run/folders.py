"""Where a run on this machine keeps what: its state for as long as it is of use, its checkpoints
for good.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from checkpoint.core.names import OWNER
from outlast.cli import output
from outlast.cli.folders import DEFAULT_STATE_DIR

# Below the folder in which the command is started, as other tools of training have theirs.
CHECKPOINTS = "outlast-runs"


class RunFolders:
    """The folders of one run."""

    def __init__(self, checkpoints: Path) -> None:
        """Make those that are deleted after the run; `checkpoints` is the root of the others."""
        # A local disk: the journal would be slow on a shared one.
        self.base = Path(tempfile.mkdtemp(prefix="outlast-run-"))
        self.checkpoints = checkpoints

    @property
    def state(self) -> Path:
        """Of the controller and its nodes, with the logs of ranks."""
        return self.base / "state"

    def close(self, job_id: str, *, is_kept: bool) -> None:
        """The run has ended: say what is kept, and delete the rest; "" where there was no job."""
        if is_kept:
            output.print_message(f"outlast: logs and state are kept in {self.base}")
        else:
            shutil.rmtree(self.base, ignore_errors=True)
        if job_id:
            self._close_checkpoints(self.checkpoints / job_id)

    def _close_checkpoints(self, folder: Path) -> None:
        # Its agents note there whose it is, whether the script saves anything or not.
        if any(path.is_file() and path.name != OWNER for path in folder.rglob("*")):
            output.print_message(f"outlast: checkpoints are kept in {folder}")
            return
        shutil.rmtree(folder, ignore_errors=True)
        # Other runs may have theirs there.
        with contextlib.suppress(OSError):
            self.checkpoints.rmdir()


def checkpoint_root(working_dir: Path) -> Path:
    """The folder of the checkpoints of all runs that are started in a folder."""
    if os.access(working_dir, os.W_OK | os.X_OK):
        return working_dir / CHECKPOINTS
    return DEFAULT_STATE_DIR.expanduser() / "runs"
