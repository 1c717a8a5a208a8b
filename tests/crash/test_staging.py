"""Workers that die while they save to host memory, and ranks that miss steps."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from checkpoint.core.names import memory_folder
from checkpoint.core.slots import NUM_SLOTS
from checkpoint.restore.restore import load_memory, sealed_steps
from checkpoint.stage import slotfile
from checkpoint.stage.slotfile import SlotFile
from outlast.crashpoints import CrashPoint
from tests.checkpoint import nursery
from tests.checkpoint.helpers import wait_for
from tests.crash.orders import DEADLINE_S, Orders

FIRST_POINTS = (CrashPoint.SLOTS_ALLOCATED, CrashPoint.SLOTS_MADE)
POINTS = (
    *FIRST_POINTS,
    CrashPoint.SLOT_CHOSEN,
    CrashPoint.SLOT_INVALID,
    CrashPoint.SLOT_HALF_COPIED,
    CrashPoint.SLOT_COPIED,
    CrashPoint.SLOT_HEADER_WRITTEN,
    CrashPoint.SLOT_SEALED,
    CrashPoint.UPLOAD_WITHDRAWN,
)
STATES = [nursery.state_of(rank) for rank in range(nursery.NUM_RANKS)]


class Nursery:
    """Ranks that stage step after step, in one attempt after the other."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.words = nursery.open_lockstep(folder)
        self.attempt = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.nursery", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def begin(self) -> list[int]:
        """Start the next attempt; the pids of its ranks."""
        self.attempt += 1
        return [int(pid) for pid in self._ask(str(self.attempt)).split()]

    def end(self) -> None:
        """SIGKILL every rank."""
        assert self._ask("end") == "ended"

    def forget(self) -> None:
        """Leave nothing in host memory."""
        for rank in range(nursery.NUM_RANKS):
            shutil.rmtree(self.folder / memory_folder(rank), ignore_errors=True)
        self.words[nursery.NEWEST : nursery.KNOWN + nursery.NUM_RANKS] = memoryview(
            array("q", [0] * (nursery.KNOWN + nursery.NUM_RANKS - nursery.NEWEST))
        )

    def wait_step(self, step: int) -> None:
        """Wait until rank 0 has come so far."""
        wait_for(partial(self._has_come_to, step), f"step {step}", DEADLINE_S)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._process.stdout.close()

    @property
    def known(self) -> int:
        """The newest step that some rank has taken for common."""
        return max(self.words[nursery.KNOWN : nursery.KNOWN + nursery.NUM_RANKS])

    @property
    def step(self) -> int:
        return self.words[nursery.ARRIVED]

    def _has_come_to(self, step: int) -> bool:
        return self.step >= step

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Orders:
    return Orders(tmp_path_factory.mktemp("orders"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, orders: Orders) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("nursery"), {**os.environ, **orders.environment})
    yield made
    made.close()


def assert_newest_common_loads(ranks: Nursery) -> int:
    """Each rank finds the newest common step whole, and of one attempt; returns it."""
    newest = nursery.common_steps(ranks.folder, STATES)[0]
    assert newest.step >= ranks.known
    for rank, state in enumerate(STATES):
        folder = ranks.folder / memory_folder(rank)
        assert load_memory(folder, newest, state) == {"step": newest.step}
        for named in state:
            assert torch.all(named.tensor == newest.step), (named.name, newest)
    return newest.step


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("point", FIRST_POINTS)
def test_slots_half_made_are_made_again_and_nothing_stays(
    point: CrashPoint, ranks: Nursery, orders: Orders
) -> None:
    ranks.forget()
    orders.give(point)
    ranks.begin()
    orders.wait(point)
    ranks.end()
    assert nursery.common_steps(ranks.folder, STATES) == []
    ranks.begin()
    ranks.wait_step(4)
    ranks.end()
    assert_newest_common_loads(ranks)
    slots = [f"slot-{index}" for index in range(NUM_SLOTS)]
    for rank in range(nursery.NUM_RANKS):
        assert files_of(ranks.folder / memory_folder(rank)) == ["shards.json", *slots]


def test_worker_that_dies_anywhere_in_a_save_leaves_a_common_step(
    ranks: Nursery, orders: Orders
) -> None:
    ranks.forget()
    last = 0
    for point in POINTS[len(FIRST_POINTS) :]:
        ranks.begin()
        ranks.wait_step(last + 3)
        # Somewhere in the rotation, and the second tensor of the payload.
        orders.give(point, passes=1)
        orders.wait(point)
        ranks.end()
        common = assert_newest_common_loads(ranks)
        assert common >= last + 1, point
        last = common


def locked(ranks: Nursery, rank: int) -> list[SlotFile]:
    """Every slot of a rank, held as a reader would: the rank has none to save to."""
    slots = slotfile.open_existing(ranks.folder / memory_folder(rank))
    for slot in slots:
        # A save may have the lock in this moment.
        wait_for(partial(slot.try_lock, exclusive=False), f"the lock of {slot.path}")
    return slots


def test_rank_without_a_free_slot_for_several_steps_costs_nobody_the_common_step(
    ranks: Nursery,
) -> None:
    """The others go on saving, one rank and then another misses steps, and all of them die."""
    ranks.begin()
    ranks.wait_step(5)
    for late, next_late in ((1, 0), (0, 1)):
        held = locked(ranks, late)
        ranks.wait_step(ranks.step + 2 * NUM_SLOTS)
        held_next = locked(ranks, next_late)
        close(held)
        # The first saves again, and the second does not: their newest steps differ.
        ranks.wait_step(ranks.step + 2 * NUM_SLOTS)
        assert newest_sealed(ranks, late) > newest_sealed(ranks, next_late)
        ranks.end()
        assert_newest_common_loads(ranks)
        close(held_next)
        ranks.begin()
        ranks.wait_step(ranks.known + 5)
    ranks.end()
    assert_newest_common_loads(ranks)


def test_rank_that_is_stopped_in_a_save_holds_the_others_and_the_common_step(
    ranks: Nursery,
) -> None:
    pids = ranks.begin()
    for _ in range(5):
        ranks.wait_step(ranks.step + 2)
        os.kill(pids[1], signal.SIGSTOP)
        # The other ends its step and waits for this one in the next.
        ranks.wait_step(ranks.words[nursery.ARRIVED + 1])
        assert nursery.common_steps(ranks.folder, STATES)[0].step >= ranks.known
        os.kill(pids[1], signal.SIGCONT)
    ranks.end()
    assert_newest_common_loads(ranks)


def newest_sealed(ranks: Nursery, rank: int) -> int:
    return max(sealed_steps(ranks.folder / memory_folder(rank), STATES[rank])).step


def close(slots: list[SlotFile]) -> None:
    for slot in slots:
        slot.close()
