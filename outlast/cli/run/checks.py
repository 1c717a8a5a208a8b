"""What is looked at before anything starts: the script, and how many ranks a machine has."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cli.errors import CliError

if TYPE_CHECKING:
    from outlast.torchrun.flags import Counted, RunOptions
    from outlast.v1.nodes_pb2 import Node

_SPECS = (".yaml", ".yml", ".json")
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def check_script(options: RunOptions, folder: Path) -> None:
    """Look whether what is to run is there; `folder` is where ranks run.

    A path that is absolute may be of other machines only, where those run the script.

    Raises:
        CliError: it is not, or is nothing that can run.
    """
    script = options.script
    if options.is_module:
        if not options.server:
            _check_module(script, folder)
        return
    if options.is_program and "/" not in script:
        if not options.server and shutil.which(script) is None:
            raise CliError(f"--no-python {script}: no such program on the PATH")
        return
    if options.server and os.path.isabs(script):
        return
    path = folder / script
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise CliError(f"{script} is a folder; give the script in it")
    if not path.exists():
        raise CliError(f"{script}: no such file in {folder}{_meant(options)}")
    if options.is_program and not os.access(path, os.X_OK):
        raise CliError(f"--no-python {script} is not executable; chmod +x, or leave the flag out")
    if not options.is_program and path.suffix in _SPECS:
        raise CliError(f"{script} is no script; `outlast submit {script}` runs a job spec")


def check_working_dir() -> str:
    """The current folder, where ranks run.

    Raises:
        CliError: it is gone.
    """
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise CliError("the current folder does not exist any more; cd to another one") from error


def workers_here(counted: int | Counted, environ: Mapping[str, str]) -> int:
    """Ranks on a node of this machine.

    Raises:
        CliError: it has none of the device that they are counted by.
    """
    if isinstance(counted, int):
        return counted
    from controller.agent.observe.capacity import count_gpus

    gpus = count_gpus()
    visible = environ.get(_VISIBLE_GPUS)
    if visible is not None:
        gpus = min(gpus, len([each for each in visible.split(",") if each.strip()]))
    return _counted(counted, gpus, os.cpu_count() or 1, "this machine")


def workers_there(counted: int | Counted, nodes: Sequence[Node]) -> int:
    """Ranks on a node of a controller's: as many as each of them can run.

    Raises:
        CliError: no connected node says what it has, or one has none.
    """
    if isinstance(counted, int):
        return counted
    known = [node for node in nodes if node.connected and node.HasField("capacity")]
    if not known:
        raise CliError(
            f"--nproc-per-node {counted} counts what connected nodes have, and there is none; give "
            "a number"
        )
    gpus = min(node.capacity.gpus for node in known)
    cpus = min(node.capacity.cpus for node in known)
    return _counted(counted, gpus, cpus, "one of the connected nodes")


def _counted(counted: Counted, gpus: int, cpus: int, where: str) -> int:
    match counted:
        case "gpu" if gpus == 0:
            raise CliError(f"--nproc-per-node gpu: {where} has no GPU; give a number, cpu or auto")
        case "gpu":
            return gpus
        case "cpu":
            return cpus
        case "auto":
            return gpus or cpus
        case "xpu":
            raise CliError("--nproc-per-node xpu: XPUs are not counted here; give a number")


def _check_module(name: str, folder: Path) -> None:
    top = name.partition(".")[0]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    places = [str(folder), *filter(None, given), *sys.path]
    found = importlib.machinery.PathFinder.find_spec(top, places)
    if found is None and top not in sys.stdlib_module_names:
        raise CliError(f"-m {name}: no module {top} in {folder}, PYTHONPATH or this environment")


def _meant(options: RunOptions) -> str:
    """What a flag of another program, or a name of a module, was probably meant for."""
    as_file = Path(options.script.replace(".", "/"))
    if as_file.with_suffix(".py").is_file() or (as_file / "__main__.py").is_file():
        return f"; for a module: -m {options.script}"
    return ""
