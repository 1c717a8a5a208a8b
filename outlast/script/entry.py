"""From a fork of the standby process to a program of the user's own.

The process has its own group and log by now. It opens its rank's black box, so that the agent
knows that it runs, and becomes the program: by `exec`, or, for a Python script of this very
interpreter, as it is, with its imports done.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection
from typing import NoReturn

from outlast.blackbox import StartMark, open_black_box
from outlast.script.fresh import be_fresh, restore_signals, script_folders, why_not
from outlast.script.interpreter import run_main
from outlast.script_contract import ScriptContract
from outlast.worker_contract import WORKER_MARK, WorkerContract

# As a shell has it.
_NOT_EXECUTABLE = 126
_NOT_FOUND = 127


def run(contract: WorkerContract, own_packages: Collection[str]) -> int:
    """Be the script of this rank; its exit code. The caller ends with it, as a program does.

    `own_packages` are those of this process that the script must not find.

    Raises:
        SystemExit: the script asks for it.
    """
    script = contract.script
    assert script is not None
    open_black_box(contract).mark(StartMark.FORKED, contract.forked_at_ns)
    environment = {**script.environment, WORKER_MARK: os.environ[WORKER_MARK]}
    os.chdir(script.cwd)
    if not script.python:
        _execute(script, environment, script.note)
    folders = script_folders(script.python, environment)
    reason = why_not(environment, folders, own_packages)
    if reason:
        _execute(script, environment, reason)
    be_fresh(environment, folders, own_packages)
    return run_main(script.python)


def _execute(script: ScriptContract, environment: dict[str, str], reason: str) -> NoReturn:
    if reason:
        _say(f"outlast: imports are not shared, a new interpreter starts: {reason}")
    restore_signals()
    # A process that has a handler for it has it ignored by Python itself.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    program = script.command[0]
    try:
        os.execvpe(program, list(script.command), environment)
    except FileNotFoundError as error:
        _say(f"outlast: cannot start {program!r}: {error.strerror}")
        os._exit(_NOT_FOUND)
    except OSError as error:
        _say(f"outlast: cannot start {program!r}: {error.strerror}")
        os._exit(_NOT_EXECUTABLE)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
