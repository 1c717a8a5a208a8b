"""What the processes of a row are told to do, and at which moment.

An order is carried out by `sabotage/sitecustomize.py` inside the process that comes to its
moment. `hold` keeps the process there until the striker lets it go: so a fault from outside
strikes exactly then, however fast the machine is.

What does not belong here: faults from outside (`strikes`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from tests.chaos.matrix import INSIDE, STORE, Fault, LayoutName, Moment, Row, Victim
from tests.controller.processes import ROOT

SABOTAGE = Path(__file__).with_name("sabotage")
WORLD_SIZES = {LayoutName.DP2: 2, LayoutName.PP2: 2, LayoutName.TP2_DP2: 4}
# The first step that is uploaded; see `cluster.SPEC`.
UPLOADED_STEP = 20
# In the middle, and no step that is uploaded.
STRUCK_STEP = 30
# While the upload is held, ranks go on to here.
STEP_BESIDE_UPLOAD = 26
# Stops that are planned, and how far the job comes between them.
NUM_STOPS, STEPS_BETWEEN_STOPS = 10, 5

_ACTS = {
    Fault.EXIT: "exit",
    Fault.EXCEPTION: "raise",
    Fault.DEADLOCK: "swap",
    Fault.NAN: "nan",
    Fault.BIT_FLIP: "flip",
}
_MOMENTS = {
    Moment.START: ("start", 1, None),
    Moment.FIRST_STEP: ("step", 1, 1),
    Moment.STEADY: ("step", 1, STRUCK_STEP),
    Moment.TWICE: ("step", 1, STRUCK_STEP),
    Moment.STAGE_1: ("stage", 1, STRUCK_STEP),
    Moment.UPLOAD: ("step", 1, STEP_BESIDE_UPLOAD),
    Moment.RESTORE: ("restore", 2, None),
    Moment.RECOVERY: ("start", 2, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """`act` when `rank` of this attempt comes to the moment `at`, of this step if it has one.

    `at` is start, step, stage, upload or restore; `act` hold, kill, exit, raise, break (as of a
    device), swap, nan, wrong (in the last digits), spike, flip or poison (its black box). Attempt 0
    stands for every one.
    """

    name: str
    at: str
    act: str
    rank: int
    attempt: int
    step: int | None = None


def struck_rank(row: Row) -> int:
    """The rank that is struck, or held while something else is."""
    rank = WORLD_SIZES[row.layout] - 1 if row.victim is Victim.LAST else 0
    # Of equal tensor ranks the first reports the loss.
    is_heard = row.fault is not Fault.NAN or row.layout is not LayoutName.TP2_DP2
    return rank if is_heard else rank - rank % 2


def other_rank(row: Row) -> int:
    """A rank on the other node."""
    return 0 if row.victim is Victim.LAST else WORLD_SIZES[row.layout] - 1


def orders_for(row: Row) -> tuple[Order, ...]:
    """What has to be ordered before the job of a row starts.

    The one named `strike` is where the fault belongs.
    """
    if row.fault is Fault.PLANNED:
        return tuple(map(_held_stop, range(1, NUM_STOPS + 1)))
    if row.moment is Moment.DIAGNOSIS:
        kill = _kill(struck_rank(row))
        return (_poisoned_box(kill), kill) if row.fault is Fault.POISON else (kill,)
    at, attempt, step = _MOMENTS[row.moment]
    act = _ACTS.get(row.fault, "hold")
    if row.moment is Moment.RECOVERY and act in ("swap", "nan", "flip"):
        at, step = "step", STRUCK_STEP
    strike = Order(name="strike", at=at, act=act, rank=struck_rank(row), attempt=attempt, step=step)
    match row.moment:
        case Moment.RESTORE | Moment.RECOVERY if not _loses_memory(row):
            return (_kill(other_rank(row)), strike)
        case Moment.RESTORE | Moment.RECOVERY:
            held = Order(name="first", at="step", act="hold", rank=0, attempt=1, step=STRUCK_STEP)
            return (held, strike)
        case Moment.TWICE if row.fault in INSIDE:
            return (_kill(other_rank(row)), strike)
        case Moment.UPLOAD:
            upload = Order(
                name="upload",
                at="upload",
                act="hold",
                rank=struck_rank(row),
                attempt=1,
                step=UPLOADED_STEP,
            )
            return (upload, *_boxes(row, strike), strike)
        case _:
            return (*_boxes(row, strike), strike)


def _boxes(row: Row, strike: Order) -> tuple[Order, ...]:
    return (_poisoned_box(strike),) if row.fault is Fault.POISON else ()


def _poisoned_box(strike: Order) -> Order:
    """Just before the strike, so that the box stays so for as long as the rank is held."""
    return replace(strike, name="box", act="poison")


def _loses_memory(row: Row) -> bool:
    """Whether the first fault takes host memory along, so that the store is needed."""
    return row.fault in STORE


def _kill(rank: int) -> Order:
    return Order(name="first", at="step", act="kill", rank=rank, attempt=1, step=STRUCK_STEP)


def _held_stop(number: int) -> Order:
    """A rank waits for each stop, so that the job outlives all of them."""
    return Order(
        name=stop_name(number),
        at="step",
        act="hold",
        rank=0,
        attempt=number,
        step=STEPS_BETWEEN_STOPS * number,
    )


def stop_name(number: int) -> str:
    return "strike" if number == 1 else f"stop-{number}"


class Desk:
    """The folder through which orders go out and word comes back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that takes these orders."""
        path = os.pathsep.join((str(SABOTAGE), str(ROOT)))
        return {"PYTHONPATH": path, "OUTLAST_CHAOS_DIR": str(self.folder)}

    def give(self, orders: tuple[Order, ...]) -> None:
        document = [asdict(order) for order in orders]
        (self.folder / "orders.json").write_text(json.dumps(document))

    def reached(self, name: str) -> int | None:
        """Pid of the process that came to this order's moment; None when none has."""
        try:
            return int((self.folder / f"{name}.reached").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def wait_reached(self, name: str, within_s: float) -> int:
        """Wait until a process came to this order's moment; its pid."""
        deadline_s = time.monotonic() + within_s
        while (pid := self.reached(name)) is None:
            assert time.monotonic() < deadline_s, f"nobody came to {name!r} in {within_s:.0f} s"
            time.sleep(0.02)
        return pid

    def release(self) -> None:
        """Let everybody go who is held, or would be from now on."""
        (self.folder / "released").touch()

    def store(self, mode: str) -> None:
        """Make the store `down` or `silent`; "" makes it well again."""
        (self.folder / "store").write_text(mode)

    def jump(self, host: str, seconds: float) -> None:
        """Change what the clock shows on a node, or on the `controller`."""
        (self.folder / f"clock-{host}").write_text(str(seconds))

    def poison(self, node: str, case: Mapping[str, object]) -> None:
        """Have a node's agent report what cannot be, in every heartbeat from now on."""
        draft = self.folder / f"poison-{node}.new"
        draft.write_text(json.dumps(case))
        draft.rename(self.folder / f"poison-{node}")

    def cure(self, node: str) -> None:
        """Have it report only what is so."""
        (self.folder / f"poison-{node}").unlink()

    def slow_down(self, what: Literal["steps", "all"], *, step_s: float = 0.05) -> None:
        """Make steps, or also checkpoints and the store, slow, as large ones are."""
        draft = self.folder / "slow.new"
        draft.write_text(f"{what} {step_s}")
        draft.rename(self.folder / "slow")

    def speed_up(self) -> None:
        """Let what was slow be fast again."""
        (self.folder / "slow").unlink(missing_ok=True)
