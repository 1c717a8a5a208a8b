"""From a start command of a script to what each rank runs, and what must be there before.

What does not belong here: the trainer's workers (`launch`), and how a fork becomes the script
(`outlast.script.entry`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from controller.agent.workers.launch import StartRefusedError
from controller.agent.workers.script_paths import script_folders_of
from controller.agent.workers.session_copy import session_copy, shadows_ours
from controller.agent.workers.supervisor import Launch
from outlast import private
from outlast.blackbox.records import MAX_COUNT
from outlast.failures import ErrorKind
from outlast.problems import FieldProblem
from outlast.rules.workload import script_index
from outlast.script_command import Start, start_of
from outlast.script_contract import ScriptContract
from outlast.spec import JobSpec
from outlast.torchrun.environment import RanksOfRun, rank_arguments, rank_environment
from outlast.v1 import agents_pb2
from outlast.worker_contract import SESSION_FILE, WorkerContract, flight_recorder

# Variables of Outlast's own are not passed on to scripts.
_OURS = "OUTLAST_"
_PATH = "PYTHONPATH"


def prepare(spec: JobSpec, state_dir: Path) -> None:
    """Refuse what is not on this node, another of which may have it; then have ready what
    the script finds of ours, below the agent's `state_dir`.

    Raises:
        StartRefusedError: with every problem that was found.
        OSError: nothing can be written there.
    """
    check_places(spec)
    _session_path(spec, state_dir)


def check_places(spec: JobSpec) -> None:
    """Refuse what is not on this node.

    Raises:
        StartRefusedError: with every problem that was found.
    """
    problems = [*_program(spec), *_folders(spec)]
    if problems:
        said = "; ".join(f"{problem.field} {problem.message}" for problem in problems)
        raise StartRefusedError(ErrorKind.MISSING, said)


def as_scripts(
    launches: Sequence[Launch],
    spec: JobSpec,
    start: agents_pb2.StartWorkers,
    *,
    state_dir: Path,
) -> list[Launch]:
    """The launches of a start command with what each rank runs, which is not the trainer.

    `state_dir` is the agent's: what a script finds of ours may be there.

    Raises:
        OSError: it cannot be written.
    """
    run = _run_of(spec, start, launches[0].contract)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
    found = _start_of(spec)
    python_path = [*spec.workload.python_path, *_session_path(spec, state_dir)]
    for launch in launches:
        # What the script asks of us by way of `outlast.session`.
        private.write_text(launch.paths.session, json.dumps(_own(launch.contract).to_env()))
    return [
        replace(
            launch,
            contract=replace(
                _own(launch.contract),
                script=_script(
                    spec, found, launch, _environment(spec, run, launch, inherited, python_path)
                ),
            ),
            # Where it ends is its own affair.
            total_steps=MAX_COUNT,
            stop_signal=signal.Signals[spec.workload.stop_signal],
            silent_limit_s=spec.recovery.hang_timeout_s,
        )
        for launch in launches
    ]


def executed(launches: Sequence[Launch], note: str) -> list[Launch]:
    """The same scripts, each in an interpreter that is started for it; `note` says why."""
    return [
        replace(
            launch,
            contract=replace(
                launch.contract, script=replace(launch.contract.script, python=(), note=note)
            ),
        )
        for launch in launches
        if launch.contract.script is not None
    ]


def _own(contract: WorkerContract) -> WorkerContract:
    """Of a rank whose store is hosted beside it."""
    return replace(contract, rendezvous_fd=None)


def _session_path(spec: JobSpec, state_dir: Path) -> list[str]:
    """Where the script finds our modules if those of this interpreter are not for it.

    A project with a `trainer.py` of its own would have them import that.
    """
    folders = script_folders_of(spec)
    needs_copy = _start_of(spec).is_foreign or shadows_ours(folders)
    return [str(session_copy(state_dir))] if needs_copy else []


def _start_of(spec: JobSpec) -> Start:
    workload = spec.workload
    return start_of(workload.command or (), executable=sys.executable, python=workload.interpreter)


def _run_of(spec: JobSpec, start: agents_pb2.StartWorkers, contract: WorkerContract) -> RanksOfRun:
    return RanksOfRun(
        run_id=contract.job_id,
        num_nodes=start.world_size // spec.workers_per_node,
        workers_per_node=spec.workers_per_node,
        master_addr=start.rendezvous_host,
        master_port=start.rendezvous_port,
        restart_count=contract.attempt - 1,
        max_restarts=spec.recovery.retry_budget,
    )


def _environment(
    spec: JobSpec,
    run: RanksOfRun,
    launch: Launch,
    inherited: Mapping[str, str],
    python_path: Sequence[str],
) -> dict[str, str]:
    """All variables of one rank; `inherited` are the agent's, as far as they are a script's."""
    contract = launch.contract
    recorder = flight_recorder(launch.paths.log.parent) if contract.device == "cuda" else {}
    environment = (
        recorder
        | dict(inherited)
        | rank_environment(
            run,
            node_index=contract.rank // spec.workers_per_node,
            local_rank=contract.local_rank,
            error_file=str(launch.paths.error),
            inherited=inherited,
        )
    )
    environment |= {SESSION_FILE: str(launch.paths.session), **spec.workload.known_env}
    if python_path:
        known = environment.get(_PATH)
        environment[_PATH] = os.pathsep.join([*python_path, *([known] if known else [])])
    return environment


def _script(
    spec: JobSpec, found: Start, launch: Launch, environment: Mapping[str, str]
) -> ScriptContract:
    """What one rank runs."""
    workload, contract = spec.workload, launch.contract
    is_preloaded = workload.preload != "off"
    return ScriptContract(
        command=rank_arguments(found.command, contract.local_rank),
        python=rank_arguments(found.python, contract.local_rank) if is_preloaded else (),
        note=found.note if is_preloaded else "",
        environment=environment,
        cwd=workload.working_dir or str(launch.paths.log.parent),
        stop_signal=signal.Signals[workload.stop_signal],
    )


def _program(spec: JobSpec) -> list[FieldProblem]:
    workload = spec.workload
    command = workload.command or ()
    found = _start_of(spec).command[0]
    where = Path(workload.working_dir or "/")
    problems = []
    # As the kernel does it: a name is looked for in the path, all else from the folder.
    path = str(where / found) if "/" in found else found
    script = script_index(command)
    if shutil.which(path, path=workload.known_env.get("PATH")) is None and script != 0:
        field = "python" if workload.interpreter == found else "command"
        problems.append(_wrong(f"workload.{field}", found, _why_no_program(path)))
    if script is not None:
        place = where / command[script]
        if not place.is_file():
            problems.append(_wrong("workload.command", command[script], "is not there"))
        elif script == 0 and not os.access(place, os.X_OK):
            problems.append(_wrong("workload.command", command[script], _NOT_EXECUTABLE))
        elif not os.access(place, os.R_OK):
            problems.append(_wrong("workload.command", command[script], "cannot be read"))
    return problems


_NOT_EXECUTABLE = "is not executable; put python before it, or make it executable (chmod +x)"


def _why_no_program(path: str) -> str:
    if "/" not in path:
        return "is no program of this node's PATH"
    return "is not executable" if Path(path).exists() else "is not there"


def _folders(spec: JobSpec) -> list[FieldProblem]:
    workload, problems = spec.workload, []
    if workload.working_dir is not None and not Path(workload.working_dir).is_dir():
        problems.append(_wrong("workload.working_dir", workload.working_dir, "is no folder"))
    for each in workload.python_path:
        if not Path(each).exists():
            problems.append(_wrong("workload.python_path", each, "is not there"))
    return problems


def _wrong(field: str, value: str, why: str) -> FieldProblem:
    # Whole: the end of a path says most.
    return FieldProblem(field=field, message=f"has {value!r}, which {why}")
