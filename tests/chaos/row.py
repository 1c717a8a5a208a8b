"""`python -m tests.chaos.row FOLDER [ROW]`: one row in a process of its own.

Writes what it came to into FOLDER/outcome.json. Without ROW it trains the job of
`--layout` undisturbed, and writes its losses into FOLDER/losses.json. Logs of all processes
stay in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path

from checkpoint.storage.storage import CorruptCheckpointError, Storage
from tests.chaos.cluster import Plant, remains, small_disk
from tests.chaos.expected import Outcome
from tests.chaos.matrix import (
    ENDS_NOBODY,
    FOLLOWED,
    Fault,
    LayoutName,
    Row,
    full,
    is_lasting,
    named,
)
from tests.chaos.orders import orders_for
from tests.chaos.strikes import ask_too_much, carry_out
from tests.chaos.watching import Seen, run_next, watch_to_the_end


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.row", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("row", nargs="?")
    parser.add_argument("--layout", type=LayoutName)
    parser.add_argument("--long", action="store_true", help="as rows whose fault goes on")
    parser.add_argument("--losses", type=Path, help="those of the undisturbed job")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.row is None:
        losses = undisturbed(Plant(given.folder, None, given.layout, is_long=given.long))
        (given.folder / "losses.json").write_text(json.dumps(losses))
        return 0
    row = named(given.row, full())
    losses = {int(step): loss for step, loss in json.loads(given.losses.read_text()).items()}
    plant = Plant(given.folder, row, row.layout, is_long=is_lasting(row))
    outcome = run(plant, row, losses)
    (given.folder / "outcome.json").write_text(json.dumps(outcome.to_json(), indent=1))
    return 0


def undisturbed(plant: Plant) -> dict[int, float]:
    """The losses of the job when nothing happens to it."""
    plant.desk.give(())
    plant.start_controller()
    try:
        plant.cluster.wait_nodes(2)
        plant.submit()
        plant.cluster.wait_state(plant.job_id, "SUCCEEDED")
        return plant.cluster.losses(plant.job_id)
    finally:
        plant.stop()
        remains(plant)


def run(plant: Plant, row: Row, losses: dict[int, float]) -> Outcome:
    """Run a row from its first process to its last."""
    begun_s = time.monotonic()
    plant.desk.give(orders_for(row))
    trouble: list[str] = []
    seen = Seen(losses={})
    struck = ""
    next_queued_s: float | None = None
    pids: dict[str, int | None] = {}
    with small_disk(plant, wanted=row.fault is Fault.DISK_FULL):
        try:
            plant.start_controller()
            plant.join_by_hand()
            plant.cluster.wait_nodes(2)
            plant.note_sessions()
            pids = plant.pids
            if row.fault is Fault.DISK_FULL:
                ask_too_much(plant)
            plant.submit()
            struck = carry_out(plant, row)
        # The boundary of a row: whatever it is, it is this row's result.
        except Exception as error:  # noqa: BLE001
            trouble += _in_words("strike", error)
            plant.desk.release()
        try:
            seen = watch_to_the_end(plant)
            trouble += _bad_checkpoints(plant)
            if row.fault in FOLLOWED and seen.state == "SUCCEEDED":
                next_queued_s, wrong = run_next(plant, losses)
                trouble += wrong
            if row.fault in ENDS_NOBODY and plant.pids != pids:
                trouble.append(f"processes were {pids}, and are {plant.pids}")
        except Exception as error:  # noqa: BLE001
            trouble += _in_words("end", error)
        left = plant.stop()
    if left:
        trouble.append(f"processes left: {left}")
    files = remains(plant)
    if files and seen.state == "SUCCEEDED":
        trouble.append(f"host memory left: {files[:4]}")
    differs = seen.differing_steps(losses)
    return Outcome(
        state=seen.state,
        reason=seen.reason,
        attempts=seen.attempts,
        struck_node=struck,
        incidents=seen.incidents,
        losses_equal=not differs,
        first_difference=differs[0] if differs else None,
        wall_s=round(time.monotonic() - begun_s, 1),
        next_queued_s=next_queued_s,
        trouble=tuple(trouble),
    )


def _bad_checkpoints(plant: Plant) -> list[str]:
    """Committed checkpoints that cannot be read back: nothing may spoil one, a zombie least."""
    root = plant.disk if plant.disk.exists() else plant.state_dir / "checkpoints"
    storage = Storage(str(root / plant.job_id))
    found = []
    try:
        for step in storage.committed_steps():
            try:
                storage.read_commit(step)
            except CorruptCheckpointError as error:
                found.append(f"committed and corrupt: {error}")
    finally:
        storage.close()
    return found


def _in_words(when: str, error: Exception) -> list[str]:
    traceback.print_exception(error)
    return [f"{when}: {type(error).__name__}: {error}"]


if __name__ == "__main__":
    sys.exit(main())
