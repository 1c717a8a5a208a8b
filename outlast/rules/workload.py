"""Rules of a job that runs a script of the user's: what may not be given, and what must agree.

What decides the trainer's arithmetic means nothing to a script; a spec that gives it expects
something that will not happen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outlast.code.digest import file_name
from outlast.problems import FieldProblem, UnreadError, changed, name_of, shown
from outlast.script_command import is_python, split_arguments
from outlast.section import Section

if TYPE_CHECKING:
    from outlast.spec import JobSpec

# Without cooperation a script's progress is not seen: a phase of it may take longer than a step.
HANG_TIMEOUT_S = 600.0
# Far above what has been trained.
MAX_NODES = 2**17
MAX_WORKERS_PER_NODE = 2**10
# More sizes would only make the job's record long: each has a spec of its own.
MAX_SIZES = 64
_TRAINER_FIELDS = ("steps", "seed", "precision", "determinism", "garbage_interval_steps")
_TRAINER_SECTIONS = ("loss_scale", "model", "parallel", "data", "optimizer", "eval")
# Of checkpoints, what only the trainer obeys.
_TRAINER_CHECKPOINTS = (
    *("load", "load_step", "load_weights_only", "memory_interval_steps", "keep_best"),
)
# Of detectors, what leaves out batches.
_TRAINER_DETECTORS = ("non_finite_again", "rollback_steps")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Whole words of a name: TOKENIZERS_PARALLELISM and MAX_TOKENS are none.
_SECRET = re.compile(r"(^|_)(TOKEN|(API)?KEY|PASSWORD|PASSWD|SECRET|CREDENTIALS?)(_|$)")


def script_index(command: Sequence[str]) -> int | None:
    """Where in a command its script is; None where it is a module, or a program of the path."""
    if not command or not all(isinstance(word, str) for word in command):
        return None
    program, *arguments = command
    if not is_python(program):
        return 0 if "/" in program or program.endswith(".py") else None
    _, target = split_arguments(arguments)
    return len(command) - len(target) if target and target[0] != "-m" else None


def runs_script(spec: JobSpec) -> bool:
    """Whether a spec has a command, as far as it could be read."""
    try:
        return spec.is_script
    except UnreadError:
        return False


def _check_alone(spec: JobSpec) -> list[FieldProblem]:
    """Without a command there is nothing that the section could speak of."""
    if spec.workload.command is not None:
        return []
    return [
        FieldProblem(
            field=f"workload.{name}",
            message=f"is {_in_words(value)}, which applies only with workload.command; give the "
            "command, or leave it out",
        )
        for name, value in changed(spec.workload).items()
    ]


def _in_words(value: object) -> str:
    """A section has no words of its own."""
    return shown(changed(value) if isinstance(value, Section) else value)


def _check_trainer_fields(spec: JobSpec) -> list[FieldProblem]:
    defaults = type(spec)(name="any")
    given = {
        name: value
        for name in _TRAINER_FIELDS
        if (value := getattr(spec, name)) != getattr(defaults, name)
    }
    return [_of_trainer(name, value) for name, value in given.items()]


def _check_trainer_sections(spec: JobSpec) -> list[FieldProblem]:
    given = {}
    for section in _TRAINER_SECTIONS:
        for name, value in changed(getattr(spec, section)).items():
            given[f"{section}.{name}"] = value
    # What the number of ranks is written as.
    if given.get("parallel.dp") == _num_ranks(spec):
        del given["parallel.dp"]
    for name, value in changed(spec.checkpoint).items():
        if name in _TRAINER_CHECKPOINTS:
            given[f"checkpoint.{name}"] = value
    for name, value in changed(spec.detectors).items():
        if name in _TRAINER_DETECTORS:
            given[f"detectors.{name}"] = value
    problems = [_of_trainer(name, value) for name, value in given.items()]
    if spec.detectors.spike == "act":
        message = "is 'act', which leaves out batches, as only the built-in trainer can; allowed: "
        problems.append(FieldProblem(field="detectors.spike", message=f"{message}off, log"))
    return problems


def _num_ranks(spec: JobSpec) -> int:
    nodes, per_node = spec.resources.nodes, spec.resources.workers_per_node
    # Parsing gives a script's spec both.
    return (nodes or 1) * (per_node or 1)


def _of_trainer(field: str, value: object) -> FieldProblem:
    return FieldProblem(
        field=field,
        message=f"is {shown(value)}, which only the built-in trainer reads; with workload.command "
        "leave it out, and give it to the script as an argument",
    )


def _check_sizes(spec: JobSpec) -> list[FieldProblem]:
    workload, resources, problems = spec.workload, spec.resources, []
    per_node, both = workload.workers_per_node, (workload.min_nodes, workload.max_nodes)
    if per_node is not None and resources.workers_per_node != per_node:
        problems.append(
            _disagree(
                "resources.workers_per_node",
                resources.workers_per_node,
                "workload.workers_per_node",
                per_node,
            )
        )
    if both.count(None) == 1:
        given, missing = ("min", "max") if both[1] is None else ("max", "min")
        problems.append(
            FieldProblem(
                field=f"workload.{missing}_nodes",
                message=f"is required with workload.{given}_nodes; for a fixed number of nodes "
                "give resources.nodes",
            )
        )
    least, most = both
    if least is not None and most is not None:
        if least > most:
            problems.append(
                FieldProblem(
                    field="workload.min_nodes",
                    message=f"is {shown(least)}; allowed: at most workload.max_nodes = "
                    f"{shown(most)}",
                )
            )
        if resources.nodes != most:
            problems.append(
                _disagree("resources.nodes", resources.nodes, "workload.max_nodes", most)
            )
    return problems


def _disagree(field: str, value: object, other: str, wanted: object) -> FieldProblem:
    return FieldProblem(
        field=field,
        message=f"is {shown(value)}, and {other} is {shown(wanted)}; give one of them",
    )


def _check_bounds(spec: JobSpec) -> list[FieldProblem]:
    bounds = (
        ("resources.nodes", spec.resources.nodes or 1, MAX_NODES),
        ("workload.workers_per_node", spec.workers_per_node, MAX_WORKERS_PER_NODE),
    )
    return [
        FieldProblem(field=field, message=f"is {shown(value)}; allowed: at most {most}")
        for field, value, most in bounds
        if value > most
    ]


def _check_elastic(spec: JobSpec) -> list[FieldProblem]:
    least = spec.recovery.elastic.min_dp
    if least is None:
        return []
    return [
        FieldProblem(
            field="recovery.elastic.min_dp",
            message=f"is {least}, which is of the built-in trainer; with workload.command give "
            "workload.min_nodes and workload.max_nodes",
        )
    ]


def _check_words(spec: JobSpec) -> list[FieldProblem]:
    """What the kernel would refuse when a process is made."""
    command, env = spec.workload.command, spec.workload.env
    assert command is not None, "of scripts only"
    problems = []
    if not command[0] or any("\0" in word for word in command):
        problems.append(
            FieldProblem(
                field="workload.command",
                message=f"is {shown(command)}; allowed: a program and its arguments, without NUL",
            )
        )
    return problems + [
        FieldProblem(
            field="workload.env",
            message=f"has {shown(name)}; allowed: names of letters, digits and '_', and values "
            "without NUL",
        )
        for name, value in env.items()
        if not _VARIABLE.fullmatch(name) or (isinstance(value, str) and "\0" in value)
    ]


def _check_references(spec: JobSpec) -> list[FieldProblem]:
    """Each value is found in one place."""
    problems = []
    for name, value in spec.workload.env.items():
        if isinstance(value, str):
            continue
        given = [value.from_env, value.from_file]
        is_right = given.count(None) == 1 and not any("\0" in each for each in given if each)
        if value.from_env is not None:
            is_right = is_right and _VARIABLE.fullmatch(value.from_env) is not None
        if value.from_file is not None:
            is_right = is_right and value.from_file.startswith("/")
        if not is_right:
            found = {key: each for key, each in value.model_dump().items() if each is not None}
            problems.append(
                FieldProblem(
                    field=f"workload.env.{name_of(name)}",
                    message=f"is {shown(found)}; allowed: text, {{from_env: NAME}} with a name of "
                    "letters, digits and '_', or {from_file: PATH} with an absolute path on nodes",
                )
            )
    return problems


def plain_secrets(spec: JobSpec) -> list[str]:
    """What is to be said of variables that look like secrets, and are written in the spec."""
    return [
        f"workload.env.{name} looks like a secret, and who may ask the controller can read it, as "
        "it is in the spec and in the journal; give {from_env: NAME}, a variable of the agents, or "
        "{from_file: PATH}, a file on the nodes"
        for name, value in spec.workload.env.items()
        if isinstance(value, str) and value and _SECRET.search(name.upper())
    ]


def _check_code(spec: JobSpec) -> list[FieldProblem]:
    """What is inside of the folder of the code must be said from there."""
    workload, problems = spec.workload, []
    if workload.code.digest is not None:
        try:
            file_name(workload.code.digest)
        except ValueError as error:
            problems.append(FieldProblem(field="workload.code.digest", message=str(error)))
    if not workload.code.is_given:
        if workload.code.exclude:
            problems.append(
                FieldProblem(
                    field="workload.code.exclude",
                    message="is given, and no code is sent; give workload.code.path, too",
                )
            )
        return problems
    problems += [
        FieldProblem(
            field=field,
            message=f"is {shown(program)}, a relative path, and no part of the code that is sent; "
            "give its full path on nodes, or a name that they find in their PATH",
        )
        for field, program in _relative_interpreters(spec)
    ]
    return problems + [
        FieldProblem(
            field=field,
            message=f"is {shown(path)}, which leads out of the folder of workload.code; relative "
            "paths are inside of it",
        )
        for field, path in paths_in_code(spec)
        if os.path.normpath(path).split("/")[0] == ".."
    ]


def _check_image(spec: JobSpec) -> list[FieldProblem]:
    """The submitter's folder is not in the image."""
    workload = spec.workload
    if workload.image is None or workload.code.is_given:
        return []
    is_below = workload.working_dir is not None and workload.working_dir.startswith("/")
    paths = [
        (field, path)
        for field, path in paths_in_code(spec)
        if field != "workload.command" or not is_below
    ]
    return [
        FieldProblem(
            field=field,
            message=f"is {shown(path)}, a relative path; with workload.image give the full path in "
            "the image, or send your folder along with workload.code",
        )
        for field, path in (*paths, *_relative_interpreters(spec))
    ]


def _relative_interpreters(spec: JobSpec) -> list[tuple[str, str]]:
    """Interpreters that a job names by a relative path, with their fields. A name alone is none: it
    is looked for in the PATH of nodes."""
    workload = spec.workload
    program = (workload.command or ("",))[0]
    named = [("workload.python", workload.python or "")]
    if is_python(program):
        named.append(("workload.command", program))
    return [(field, path) for field, path in named if "/" in path and not path.startswith("/")]


def paths_in_code(spec: JobSpec) -> list[tuple[str, str]]:
    """The relative paths of a job that brings code or runs in an image, with their fields."""
    workload = spec.workload
    command = workload.command or ()
    script = script_index(command)
    paths = [] if script is None else [("workload.command", command[script])]
    paths += [("workload.working_dir", workload.working_dir)] if workload.working_dir else []
    paths += [("workload.python_path", each) for each in workload.python_path]
    return [(field, path) for field, path in paths if not path.startswith("/")]


def smaller_sizes(spec: JobSpec) -> list[JobSpec]:
    """The spec at each smaller number of nodes that it allows, largest first.

    Of more than `MAX_SIZES` some, evenly spread, and the smallest.
    """
    least, most = spec.workload.min_nodes, spec.workload.max_nodes
    if least is None or most is None or least >= most:
        return []
    numbers = list(range(most - 1, least - 1, -max(1, -(-(most - least) // MAX_SIZES))))
    return [_with_nodes(spec, nodes) for nodes in dict.fromkeys([*numbers, least])]


def _with_nodes(spec: JobSpec, nodes: int) -> JobSpec:
    dp = nodes * spec.workers_per_node
    # This size has none of its own.
    alone = {"min_nodes": None, "max_nodes": None}
    return spec.model_copy(
        update={
            "parallel": spec.parallel.model_copy(update={"dp": dp}),
            "resources": spec.resources.model_copy(update={"nodes": nodes}),
            "workload": spec.workload.model_copy(update=alone),
        }
    )


ALONE = (_check_alone,)
# Of a job with a command.
RULES = (
    _check_trainer_fields,
    _check_trainer_sections,
    _check_sizes,
    _check_bounds,
    _check_elastic,
    _check_words,
    _check_references,
    _check_code,
    _check_image,
)
