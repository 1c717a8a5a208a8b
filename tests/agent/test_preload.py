"""Modules of a script that the standby process imports before it forks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from controller.agent.config import Limits
from controller.agent.mistakes import Mistakes
from controller.agent.observe.oom import OomKills
from controller.agent.workers.cgroups import WorkerCgroups
from controller.agent.workers.environment import standby_environment
from controller.agent.workers.preload import NOTHING, Preload, preload_of, preload_of_trainer
from controller.agent.workers.standby_link import StandbyLink
from controller.agent.workers.supervisor import Supervisor
from controller.agent.workers.worker_events import WorkerEvents
from outlast.spec.parse import parse_spec
from tests.agent import standbys
from tests.agent.harness import DEADLINE_S
from tests.agent.scripts_of import script_of
from tests.contracts import contract_of

EXECUTABLE = "/env/bin/python"
# For what needs none.
STATE_DIR = Path("/none")


def wanted(**workload: Any) -> Preload:
    workload = {"command": ["python", "/job/train.py"], **workload}
    return preload_of(parse_spec({"name": "job", "workload": workload}), EXECUTABLE, STATE_DIR)


def test_what_the_standby_has_anyway_takes_no_other_standby() -> None:
    assert wanted().modules == ("torch._dynamo",)
    assert wanted(preload=["torch", "numpy"]) == wanted()
    assert wanted(preload="off") == NOTHING
    assert preload_of(parse_spec({"name": "job"}), EXECUTABLE, STATE_DIR) == NOTHING


def test_on_a_gpu_the_trainer_finds_what_it_compiles_with(tmp_path: Path) -> None:
    assert preload_of_trainer(tmp_path) == NOTHING
    for name in ("nvidiactl", "nvidia0"):
        (tmp_path / name).touch()
    found = preload_of_trainer(tmp_path)
    program = (
        "import os, sys\n"
        "import torch\n"
        "torch.cuda.is_available = lambda: sys.exit('CUDA is asked for')\n"
        f"for module in {found.modules}: __import__(module)\n"
        "assert 'torch._inductor.async_compile' in sys.modules\n"
        "assert len(os.listdir('/proc/self/task')) == 1, 'a fork would hang'\n"
    )
    environment = standby_environment(found.environment_of(os.environ), interface="lo")
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_modules_are_looked_for_where_the_script_finds_them() -> None:
    found = wanted(preload=["torch", "mine"], python_path=["/lib"], env={"A": "1"})
    assert found == Preload(
        modules=("torch._dynamo", "mine"), folders=("/job", "/lib"), environment={"A": "1"}
    )
    module = wanted(command=["python", "-m", "mine"], preload=["mine"], working_dir="/here")
    assert module.folders == ("/here",)


def test_another_interpreter_has_a_standby_of_its_own(tmp_path: Path) -> None:
    workload = {"command": ["python", "/job/train.py"], "python": "/other/bin/python"}
    spec = parse_spec({"name": "job", "workload": {**workload, "preload": ["torch", "mine"]}})
    found = preload_of(spec, EXECUTABLE, tmp_path)
    assert found.python == "/other/bin/python"
    # numpy is not asked for: it need not be there.
    own = ("torch", "torch.distributed", "outlast.session.checkpoints")
    assert found.modules == (*own, "torch._dynamo", "mine")
    assert found.folders == ("/job",)
    session_dir = found.environment_of({"PYTHONPATH": "/known"})["PYTHONPATH"].split(os.pathsep)[0]
    program = found.program("trainer.worker.script_store")
    assert program is not None
    for module in (program, "outlast.session"):
        place = Path(session_dir, *module.split("."))
        assert place.is_dir() or place.with_suffix(".py").is_file()
    assert found.program("diagnostics.runner") is None, "it would need our own environment"


def test_what_is_executed_shares_no_imports() -> None:
    assert wanted(command=["bash", "train.sh"], preload=["mine"]) == NOTHING
    assert wanted(python="/other/bin/python", preload="off") == NOTHING
    assert wanted(python="/other/bin/python", command=["python", "-c", "pass"]) == NOTHING


MODULES = {
    "good": "import os\nLOADED_BY = os.getpid()\nSET = os.environ.get('OF_JOB')\n",
    "threaded": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n",
    "connected": "import socket\nlistening = socket.create_server(('127.0.0.1', 0))\n",
    "failing": "raise RuntimeError('no')\n",
    "leaving": "raise SystemExit(3)\n",
    "last": "import os\nLOADED_BY = os.getpid()\n",
}
REASONS = {
    "threaded": "it starts 1 thread",
    "connected": "it opens a socket",
    "failing": "RuntimeError: no",
    "leaving": "SystemExit: 3",
    "absent": "ModuleNotFoundError: No module named 'absent'",
    "trainer": "Outlast has a package of that name",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "script.py").write_text(
        "import json, os, good, last\n"
        "facts = [good.LOADED_BY != os.getpid(), last.LOADED_BY != os.getpid(), good.SET]\n"
        "print('facts', json.dumps(facts))\n"
    )
    return tmp_path


@pytest.mark.parametrize("is_of_one_job", [True, False], ids=["own", "installed"])
def test_a_job_that_is_over_leaves_no_imports_of_its_own_unless_another_has_taken_its_place(
    tmp_path: Path, is_of_one_job: bool
) -> None:
    one, other = (Preload(modules=(name,), environment={"KEY": name}) for name in ("a", "b"))

    async def scenario() -> list[Preload]:
        used: list[Preload] = []

        class Link:
            def __init__(self) -> None:
                self.is_of_one_job = is_of_one_job

            def use(self, preload: Preload) -> None:
                used.append(preload)

            async def wait_ready(self, timeout_s: float) -> None:
                return None

        workers = Supervisor(
            limits=Limits(),
            standby=cast(StandbyLink, Link()),
            events=cast(WorkerEvents, None),
            oom_kills=OomKills(),
            cgroups=WorkerCgroups(tmp_path),
            mistakes=Mistakes(),
        )
        await workers.prepare("one", one)
        workers.drop_preload("unknown")
        await workers.prepare("other", other)
        workers.drop_preload("one")
        workers.drop_preload("other")
        return used

    left = [NOTHING] if is_of_one_job else []
    assert asyncio.run(scenario()) == [one, other, *left]


def test_only_installed_packages_that_read_no_variables_stay_for_the_next_job(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text("")
    folders = (str(tmp_path),)
    installed = ("colorsys", "xxhash")
    expected = (
        (Preload(modules=installed, folders=folders), False),
        (Preload(modules=(*installed, "mine"), folders=folders), True),
        (Preload(modules=installed, environment={"KEY": "secret"}), True),
    )

    async def scenario() -> None:
        async with standbys.running(tmp_path) as (standby, _):
            for preload, is_of_one_job in expected:
                standby.use(preload)
                assert standby.is_of_one_job
                await standby.wait_ready(DEADLINE_S)
                assert standby.is_of_one_job == is_of_one_job, preload

    asyncio.run(scenario())


def test_what_would_hang_in_a_fork_is_left_out_and_the_rest_is_there(folder: Path) -> None:
    preload = Preload(
        modules=("good", *REASONS, "last"), folders=(str(folder),), environment={"OF_JOB": "7"}
    )

    async def scenario() -> str:
        loop = asyncio.get_running_loop()
        status: asyncio.Future[int] = loop.create_future()
        async with standbys.running(folder, exited=lambda key, code: status.set_result(code)) as (
            standby,
            _,
        ):
            await standby.wait_ready(DEADLINE_S)
            first = standby.pid
            standby.use(preload)
            await standby.wait_ready(DEADLINE_S)
            assert standby.pid != first
            assert standby.left_out == REASONS
            script = script_of(["python", "script.py"], folder)
            contract = replace(contract_of(folder), script=script)
            await standby.fork("job/1/0", contract)
            async with asyncio.timeout(DEADLINE_S):
                assert await status == 0
            # The same again is no reason to begin anew, and nothing at all is.
            second = standby.pid
            standby.use(preload)
            await standby.wait_ready(DEADLINE_S)
            assert standby.pid == second
            standby.use(NOTHING)
            await standby.wait_ready(DEADLINE_S)
            assert standby.pid != second
            assert not standby.left_out
        return contract.log_path.read_text()

    log = asyncio.run(scenario())
    facts = next(line for line in log.splitlines() if line.startswith("facts"))
    assert json.loads(facts.removeprefix("facts")) == [True, True, "7"]
    for module, why in REASONS.items():
        assert f"outlast: {module} is not imported beforehand: {why}" in log
