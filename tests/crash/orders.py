"""Orders processes to end at crash points, and sees whether they did."""

from __future__ import annotations

from pathlib import Path

from outlast.crashpoints import FOLDER_VARIABLE, CrashPoint
from tests.checkpoint.helpers import wait_for

# Two cores are shared with whatever else runs.
DEADLINE_S = 60.0


class Orders:
    """The folder of orders; processes with this environment obey them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        return {FOLDER_VARIABLE: str(self._folder)}

    def give(self, point: CrashPoint, *, passes: int = 0) -> None:
        """The next process at `point` ends there, once it has been passed so often."""
        draft = self._folder / ".draft"
        draft.write_text(str(passes))
        draft.rename(self._folder / point.value)

    def is_obeyed(self, point: CrashPoint) -> bool:
        return not (self._folder / point.value).exists()

    def wait(self, point: CrashPoint) -> None:
        """Wait until a process has ended at `point`."""
        wait_for(lambda: self.is_obeyed(point), f"a crash at {point.value}", DEADLINE_S)
