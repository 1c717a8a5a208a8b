"""Variables of a script whose values are on this node: secrets, which are read when ranks start.

They go to the ranks and nowhere else: no message names more than the variable and its place.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from controller.agent.threads import HungCallsError, run_blocking
from controller.agent.workers.launch import StartRefusedError
from outlast.failures import ErrorKind
from outlast.spec import JobSpec
from outlast.spec.workload import VariableSpec

# The kernel takes 128 KiB for one variable; a token or a key has far less.
MAX_VALUE_BYTES = 64 * 1024


async def variables_here(spec: JobSpec, environ: Mapping[str, str], *, within_s: float) -> JobSpec:
    """`with_variables`, in a thread: a file may be on a mount that does not answer.

    Raises:
        StartRefusedError: naming each that is not here, or all that were looked for in vain.
    """
    files = [
        f"workload.env.{name} from the file {value.from_file}"
        for name, value in spec.workload.env.items()
        if not isinstance(value, str) and value.from_file is not None
    ]
    try:
        async with asyncio.timeout(within_s):
            # A name of its own: what hangs here must not use up the threads of other looks.
            return await run_blocking(lambda: with_variables(spec, environ), "variables")
    except (TimeoutError, HungCallsError) as error:
        raise StartRefusedError(
            ErrorKind.MISSING,
            f"{', '.join(files)}: not read in {within_s:g} s; a mount of this node does not answer",
        ) from error


def with_variables(spec: JobSpec, environ: Mapping[str, str]) -> JobSpec:
    """The spec with the values of all variables; `environ` is the agent's environment.

    Raises:
        StartRefusedError: naming each that is not here, and where it was looked for.
    """
    env: dict[str, str | VariableSpec] = {}
    problems = []
    for name, value in spec.workload.env.items():
        try:
            env[name] = value if isinstance(value, str) else _found(value, environ)
        except LookupError as error:
            problems.append(f"workload.env.{name} is {error.args[0]}")
    if problems:
        # Another node may have it.
        raise StartRefusedError(ErrorKind.MISSING, "; ".join(problems))
    workload = spec.workload.model_copy(update={"env": env})
    return spec.model_copy(update={"workload": workload})


def _found(place: VariableSpec, environ: Mapping[str, str]) -> str:
    """The value of a variable.

    Raises:
        LookupError: it is not there; says where.
    """
    if place.from_file is not None:
        return _in_file(Path(place.from_file))
    name = place.from_env or ""
    if name not in environ:
        raise LookupError(f"from the variable {name} of this node's agent, which is not set")
    return environ[name]


def _in_file(path: Path) -> str:
    where = f"from the file {path} of this node, which"
    try:
        # A pipe would be waited for, until somebody writes to it.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise LookupError(f"{where} is not a regular file")
            data = file.read(MAX_VALUE_BYTES + 1)
    except OSError as error:
        raise LookupError(f"{where} cannot be read: {error.strerror}") from error
    if len(data) > MAX_VALUE_BYTES:
        raise LookupError(f"{where} is larger than {MAX_VALUE_BYTES >> 10} KiB")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        # Not from it: it quotes what it was about.
        raise LookupError(f"{where} is not UTF-8 text") from None
    if "\0" in text:
        raise LookupError(f"{where} has a NUL")
    return text.removesuffix("\n").removesuffix("\r")
