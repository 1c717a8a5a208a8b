"""The job that a command line of torchrun asks for, as a document that can be submitted.

What does not belong here: whether the script is there, and how many ranks `gpu` or `auto` means on
a machine; the caller checks these.
"""

from __future__ import annotations

import os
import re
from typing import Any

from outlast.rules.workload import script_index
from outlast.torchrun.flags import RunOptions

# Of a job's name, what is left for the script's beside a suffix.
_MAX_NAME = 40
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


def spec_of_run(
    options: RunOptions,
    *,
    name: str,
    working_dir: str,
    workers_per_node: int,
    checkpoint_url: str | None = None,
) -> dict[str, Any]:
    """The job spec of a run; `options.workers_per_node` is counted by now.

    `checkpoint_url` is the folder of the checkpoints that a script has Outlast save for it.
    A script with a relative path is below `working_dir`, where its ranks run, as with torchrun.

    Raises:
        ValueError: `working_dir` is not in the folder that is to be sent along.
    """
    workload: dict[str, Any] = {
        "command": list(command_of(options)),
        "working_dir": working_dir,
        "workers_per_node": workers_per_node,
    }
    if options.code:
        workload |= _sent(options, working_dir)
    env = _environment(options)
    if env:
        workload["env"] = env
    if options.min_nodes < options.max_nodes:
        workload["min_nodes"] = options.min_nodes
        workload["max_nodes"] = options.max_nodes
    if options.stop_grace_s is not None:
        workload["stop_grace_s"] = float(options.stop_grace_s)
    recovery: dict[str, Any] = {"ladder": _ladder(options)}
    if options.max_restarts is not None:
        # Who asks for so many means that many, whatever fails.
        recovery |= {"retry_budget": options.max_restarts, "retry_program_errors": True}
    if not options.server:
        # On this machine the script itself finds out sooner than checks of the node do.
        recovery["preflight"] = False
    spec: dict[str, Any] = {
        "name": name,
        "workload": workload,
        "resources": {"nodes": options.max_nodes},
        "recovery": recovery,
    }
    if checkpoint_url is not None:
        spec["checkpoint"] = {"url": checkpoint_url}
    return spec


def _sent(options: RunOptions, working_dir: str) -> dict[str, Any]:
    """The same places, in the folder that is sent along."""
    root = os.path.realpath(os.path.join(working_dir, os.path.expanduser(options.code)))
    inside = os.path.relpath(os.path.realpath(working_dir), root)
    if inside.split("/")[0] == "..":
        raise ValueError(
            f"--code {options.code}: the current folder is not in it; cd to where the script is "
            "to run, in that folder"
        )
    command = list(command_of(options))
    script = script_index(command)
    if script is not None and not command[script].startswith("/"):
        command[script] = os.path.normpath(os.path.join(inside, command[script]))
    return {"command": command, "working_dir": inside, "code": {"path": root}}


def _ladder(options: RunOptions) -> list[str]:
    """What may be done about a fault. Never a pause: the command must end, and nobody resumes."""
    if options.server:
        return ["restart", "diagnose", "replace"]
    # A machine looks at its own health in vain; a node that it plays may have a spare one.
    return ["restart", "replace"] if options.local_nodes > options.min_nodes else ["restart"]


def command_of(options: RunOptions) -> tuple[str, ...]:
    """What each rank runs."""
    if options.is_program:
        return (options.script, *options.script_args)
    if options.is_module:
        return ("python", "-m", options.script, *options.script_args)
    return ("python", options.script, *options.script_args)


def job_name(script: str, suffix: str) -> str:
    """The name of the job of a script or module: `train-3f2a9c` of `/a/train.py`.

    `suffix` tells it from other runs of the same script.
    """
    stem = script.rstrip("/").rpartition("/")[2].removesuffix(".py").lower()
    plain = _NOT_IN_NAMES.sub("-", stem).strip("-")[:_MAX_NAME].rstrip("-")
    return f"{plain or 'run'}-{suffix}"


def _environment(options: RunOptions) -> dict[str, str]:
    """What torchrun sets by its flags, and a job's own id or default would be otherwise."""
    env = {}
    if options.run_id is not None:
        env["TORCHELASTIC_RUN_ID"] = options.run_id
    if options.role != "default":
        env["ROLE_NAME"] = options.role
    return env
