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


def run(desk: Desk | None, program: str, *, node: str | None = "node-1") -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SABOTAGE), str(ROOT)])}
    environment.pop("OUTLAST_CHAOS_DIR", None)
    if desk is not None:
        environment["OUTLAST_CHAOS_DIR"] = str(desk.folder)
        if node is not None:
            environment["OUTLAST_LOCAL_NODE"] = f"/somewhere/{node}"
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
        "import checkpoint.upload.uploader, trainer.worker.process as worker\n"
        "import trainer.worker.restoring as restoring\n"
        "import checkpoint.stage.stager as stage\n"
        "from controller.agent.agent import Agent\n"
        "print(worker._train.__wrapped__.__name__, stage.Stager.save.__wrapped__.__name__,\n"
        "      restoring.restore.__wrapped__.__name__, Agent._heartbeat.__wrapped__.__name__)"
    )
    assert run(desk, program) == "_train save restore _heartbeat"


def test_nothing_is_patched_without_orders() -> None:
    program = (
        "import checkpoint.storage.storage as it; print(hasattr(it.Storage._call, '__wrapped__'))"
    )
    assert run(None, program) == "False"


def test_a_clock_jumps_on_the_node_that_is_meant_only(desk: Desk) -> None:
    program = "import os, time; print(time.time() - os.times().elapsed)"
    before_s = float(run(desk, program))
    desk.jump("node-0", SLEEPS_S)
    assert float(run(desk, program)) - before_s < SLEEPS_S / 2
    desk.jump("node-1", SLEEPS_S)
    assert float(run(desk, program)) - before_s > SLEEPS_S / 2
    assert float(run(desk, program, node=None)) - before_s < SLEEPS_S / 2
    desk.jump("controller", -SLEEPS_S)
    assert float(run(desk, program, node=None)) - before_s < -SLEEPS_S / 2
    assert float(run(desk, program)) - before_s > SLEEPS_S / 2


def test_bad_reports_are_refused_by_the_box_s_reader_and_can_be_sent(
    desk: Desk, tmp_path: Path
) -> None:
    program = (
        "import bad_reports\n"
        "from outlast.blackbox import Phase, Reader, Writer\n"
        f"box = Writer({str(tmp_path / 'box')!r}, rank=0, world_size=2, attempt=1)\n"
        "box.resumed(0)\n"
        "bad_reports.write_into(box)\n"
        f"reader = Reader({str(tmp_path / 'box')!r})\n"
        # A step that some other job may have is for those to refuse who know this one.
        "assert {record.step for record in reader.new_steps()} <= {2**40}\n"
        "assert reader.present().phase == -1 and reader.present().completed_step == -1\n"
        "case = bad_reports.Case(job_id='job', attempt=1, own=0, foreign=1)\n"
        "sent = [*bad_reports.events(case), *bad_reports.summaries(case)]\n"
        "print(all(type(each)().FromString(each.SerializeToString()) for each in sent))"
    )
    assert run(desk, program) == "True"


def test_a_store_that_is_down_refuses_and_one_that_is_silent_runs_into_its_deadline(
    desk: Desk, tmp_path: Path
) -> None:
    program = (
        "from checkpoint.storage.storage import Storage, StorageUnavailableError\n"
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
