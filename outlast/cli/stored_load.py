"""What is stored at `checkpoint.load`, looked at for a moment from where a command runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.problems import FieldProblem, shown
from outlast.rules.places import NO_CHECKPOINT, local_path

if TYPE_CHECKING:
    from outlast.spec import JobSpec

# What a person who submits a job waits for; a store that answers takes a second or two.
LOOK_S = 5.0
_CALL_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLoad:
    """What was found there."""

    url: str
    problems: tuple[FieldProblem, ...] = ()
    unseen: str = ""
    """Why it could not be compared from here; "" when it was."""

    @property
    def is_everywhere(self) -> bool:
        """Whether a node certainly finds the same: the checkpoints of a store are there for all.

        A folder may differ, and another configuration of the client may mean another store.
        """
        has_some = all(NO_CHECKPOINT not in problem.message for problem in self.problems)
        return local_path(self.url) is None and has_some

    @property
    def warning(self) -> str:
        """That nothing was compared, in words; "" when it was."""
        if not self.unseen:
            return ""
        return (
            f"checkpoint.load is {shown(self.url)}, which could not be compared with the spec from "
            f"here: {self.unseen}; the first node compares it before the job starts"
        )


def look_at_load(spec: JobSpec, url: str, within_s: float = LOOK_S) -> StoredLoad:
    """Compare what is stored at `url` with the spec, if the store answers in time."""
    found = StoredLoad(url=url, unseen=f"no answer in {within_s:g} s")
    answered = threading.Event()

    def look() -> None:
        nonlocal found
        found = _look(spec, url)
        answered.set()

    # A call that hangs in a store's client must not keep the command from its end.
    threading.Thread(target=look, name="look-at-load", daemon=True).start()
    answered.wait(within_s)
    return found


def _look(spec: JobSpec, url: str) -> StoredLoad:
    from checkpoint.loading import wrong_to_load
    from checkpoint.storage.storage import Storage
    from outlast.errors import OutlastError

    try:
        problems = wrong_to_load(spec, url, Storage(url, deadline_s=_CALL_S))
    except (OutlastError, ValueError, OSError) as error:
        reason = str(error).removeprefix(f"checkpoint storage {url}: ")
        return StoredLoad(url=url, unseen=reason)
    return StoredLoad(url=url, problems=tuple(problems))
