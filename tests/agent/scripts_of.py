"""Ranks that are scripts, forked from a standby process of the test, without an agent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outlast.script_command import start_of
from outlast.script_contract import ScriptContract
from tests.agent import standbys
from tests.contracts import contract_of

SCRIPTS = Path(__file__).parent / "scripts"
FACTS = SCRIPTS / "facts.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a script ended and what it wrote."""

    code: int
    log: str

    @property
    def facts(self) -> dict[str, Any]:
        line = next(line for line in self.log.splitlines() if line.startswith("facts:"))
        found: dict[str, Any] = json.loads(line.removeprefix("facts:"))
        return found


def script_of(
    command: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    python: str = "",
) -> ScriptContract:
    start = start_of(command, executable=sys.executable, python=python)
    return ScriptContract(
        command=start.command,
        # The standby process of these tests is of our own interpreter.
        python=() if start.is_foreign else start.python,
        note=start.note,
        environment=dict(os.environ if environment is None else environment),
        cwd=str(cwd),
        stop_signal=signal.SIGTERM,
    )


async def run_script(folder: Path, script: ScriptContract, *arguments: str) -> Ended:
    """Run it in a fork of a standby process; `arguments` are the standby's."""
    folder.mkdir(exist_ok=True)
    loop = asyncio.get_running_loop()
    status: asyncio.Future[int] = loop.create_future()
    contract = replace(contract_of(folder), script=script)
    async with standbys.running(
        folder, *arguments, exited=lambda key, code: status.set_result(code)
    ) as (link, _):
        await link.wait_ready(60.0)
        await link.fork("job/1/0", contract)
        async with asyncio.timeout(60.0):
            code = os.waitstatus_to_exitcode(await status)
    return Ended(code=code, log=contract.log_path.read_text())


async def run_plain(
    command: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run it as a person does, with `python -u` as torchrun does."""
    given = list(command)
    if given[0] == "python":
        given[:1] = [sys.executable, "-u"]
    process = await asyncio.create_subprocess_exec(
        *given,
        cwd=cwd,
        env=dict(os.environ if environment is None else environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        process_group=0,
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return Ended(code=process.returncode, log=output.decode())
