"""What is ordered happens inside processes, and nothing happens without an order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.orders import SABOTAGE, Desk
from tests.controller.processes import ROOT

SLEEPS_S = 3600.0


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path / "orders")
    desk.give(())
    return desk


def run(desk: Desk | None, program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SABOTAGE), str(ROOT)])}
    environment.pop("OUTLAST_CHAOS_DIR", None)
    if desk is not None:
        environment["OUTLAST_CHAOS_DIR"] = str(desk.folder)
        environment["OUTLAST_LOCAL_NODE"] = "/somewhere/node-1"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_everything_that_is_patched_is_there_to_be_patched(desk: Desk) -> None:
    program = (
        "import checkpoint.upload, trainer.worker as worker, checkpoint.stage as stage\n"
        "print(worker._train.__wrapped__.__name__, stage.Stager.save.__wrapped__.__name__,\n"
        "      worker.restore.__wrapped__.__name__)"
    )
    assert run(desk, program) == "_train save restore"


def test_nothing_is_patched_without_orders() -> None:
    program = "import checkpoint.storage as it; print(hasattr(it.Storage._call, '__wrapped__'))"
    assert run(None, program) == "False"


def test_a_clock_jumps_on_the_node_that_is_meant_only(desk: Desk) -> None:
    program = "import os, time; print(time.time() - os.times().elapsed)"
    before_s = float(run(desk, program))
    desk.jump("node-0", SLEEPS_S)
    assert float(run(desk, program)) - before_s < SLEEPS_S / 2
    desk.jump("node-1", SLEEPS_S)
    assert float(run(desk, program)) - before_s > SLEEPS_S / 2


def test_a_store_that_is_down_refuses_and_one_that_is_silent_runs_into_its_deadline(
    desk: Desk, tmp_path: Path
) -> None:
    program = (
        "from checkpoint.storage import Storage, StorageUnavailableError\n"
        f"storage = Storage({str(tmp_path / 'store')!r}, deadline_s=0.5)\n"
        "try:\n"
        "    storage.write_bytes('it', b'')\n"
        "    print('fine')\n"
        "except StorageUnavailableError as error:\n"
        "    print(type(error).__name__)\n"
        "import os\n"
        # The call that was left behind would hold the process until the store is well.
        "os._exit(__import__('sys').stdout.flush() or 0)"
    )
    assert run(desk, program) == "fine"
    desk.store("down")
    assert run(desk, program) == "StorageUnavailableError"
    desk.store("silent")
    assert run(desk, program) == "StorageTimeoutError"
