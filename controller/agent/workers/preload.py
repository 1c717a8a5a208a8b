"""What a standby process imports for a job, beside what it imports always."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from controller.agent.observe.capacity import count_gpus
from controller.agent.workers.script_paths import script_folders_of
from controller.agent.workers.session_copy import OURS, ROOTS, moved_name, session_copy
from outlast.script_command import start_of
from outlast.spec import JobSpec
from outlast.startup import forking_command

_STANDBY = "trainer.worker.standby"
# Another interpreter may have no numpy; torch imports it where there is one.
_ALWAYS_THERE = ("torch", "torch.distributed", "outlast.session.checkpoints")
_PATH = "PYTHONPATH"
# torch's optimizers import it at their first step: 2 s of each restart.
_AT_FIRST_STEP = ("torch._dynamo",)
# The standby has them in any case.
_ALWAYS = ("numpy", "torch", "torch.distributed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """Modules, the folders that they are looked for in first, and variables that they may read."""

    modules: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    # Not shown where this is: it may have secrets.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    python: str = ""
    """The interpreter of the standby where it is not ours."""
    session_dir: str = ""
    """Where that finds our modules."""

    def command(self) -> list[str]:
        """Starts the standby process; what the agent has to say besides follows."""
        named = [("--extra", module) for module in self.modules]
        named += [("--folder", folder) for folder in self.folders]
        extras = [word for pair in named for word in pair]
        if not self.python:
            return [*forking_command(_STANDBY), *extras]
        # It imports what is there.
        own = ("--entry", "", "--preload", "", "--packages", OURS)
        return [*forking_command(moved_name(_STANDBY), executable=self.python), *own, *extras]

    def environment_of(self, given: Mapping[str, str]) -> dict[str, str]:
        """The standby's, where the agent has `given`."""
        environment = {**given, **self.environment}
        if self.session_dir:
            known = environment.get(_PATH)
            environment[_PATH] = os.pathsep.join([self.session_dir, *([known] if known else [])])
        return environment

    def program(self, module: str) -> str | None:
        """What a program of the agent's is called in the standby; None where it is not there."""
        if not self.python:
            return module
        return moved_name(module) if module in ROOTS else None


NOTHING = Preload()

# What the trainer compiles operations with at its first step on a GPU: seconds of each restart.
_OF_TRAINER_ON_GPU = Preload(
    modules=("torch._dynamo", "torch._inductor.compile_fx"),
    # Without these the import would start processes, which a fork cannot use, and the CUDA driver,
    # which does not survive one.
    environment={
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_USE_EXPERIMENTAL_BENCHMARKER": "0",
    },
)


def preload_of_trainer(device_dir: Path = Path("/dev")) -> Preload:
    """What the standby is to import for jobs without a script, and while there is none."""
    return _OF_TRAINER_ON_GPU if count_gpus(device_dir) else NOTHING


def preload_of(spec: JobSpec, executable: str, state_dir: Path) -> Preload:
    """What the standby is to import for a job; `executable` is our interpreter.

    Raises:
        OSError: what another interpreter needs cannot be written below `state_dir`.
    """
    workload = spec.workload
    command = workload.command
    if command is None:
        return preload_of_trainer()
    if workload.preload == "off":
        return NOTHING
    found = start_of(command, executable=executable, python=workload.interpreter)
    always = (*(_ALWAYS_THERE if found.is_foreign else ()), *_AT_FIRST_STEP)
    wanted = dict.fromkeys((*always, *workload.preload))
    modules = tuple(module for module in wanted if found.is_foreign or module not in _ALWAYS)
    if not modules or not found.python:
        return NOTHING
    return Preload(
        modules=modules,
        folders=script_folders_of(spec),
        environment=workload.known_env,
        python=found.command[0] if found.is_foreign else "",
        session_dir=str(session_copy(state_dir)) if found.is_foreign else "",
    )
