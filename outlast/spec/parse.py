"""From a document to a job spec, with every problem found at once.

pydantic parses the fields; `outlast.rules` then looks at what only makes sense
together (layers over stages, heads over tp, batch over dp x micro-batch). Each
problem has its field path and what is allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pydantic import ValidationError

from outlast.problems import (
    FieldProblem,
    SpecError,
    Unread,
    UnreadError,
    multiples_beside,
    name_of,
    shown,
)
from outlast.rules.check import check
from outlast.rules.fields import explain
from outlast.rules.workload import HANG_TIMEOUT_S, runs_script
from outlast.spec.models import JobSpec


def parse_spec(document: object) -> JobSpec:
    """The spec in `document` (parsed YAML or JSON), if a job may be submitted with it.

    Raises:
        SpecError: with every problem found.
    """
    spec, problems = read_spec(document)
    if spec is not None:
        problems += check(spec)
    if spec is None or problems:
        raise SpecError(tuple(problems))
    return spec


def accepted_spec(document: object) -> JobSpec:
    """The spec of a job that a controller has accepted, perhaps by the rules of an older one.

    Raises:
        SpecError: a field has a value of the wrong kind.
    """
    spec, problems = read_spec(document)
    if spec is None or problems:
        raise SpecError(tuple(problems))
    return spec


def read_spec(document: object) -> tuple[JobSpec | None, list[FieldProblem]]:
    """The spec as far as its fields can be read each alone, and those that cannot.

    What cannot be read is `Unread` in the spec; there is none where nothing can be.
    """
    if not isinstance(document, dict):
        kind = (
            "and this is empty"
            if document is None
            else f"not {'a list' if isinstance(document, list) else shown(document)}"
        )
        message = f"must be a mapping of fields, such as 'name: my-job', {kind}"
        return None, [FieldProblem(field="(document)", message=message)]
    problems = [
        FieldProblem(field=name_of(key), message="is not a field: fields have names of letters")
        for key in document
        if not isinstance(key, str)
    ]
    named = {key: value for key, value in document.items() if isinstance(key, str)}
    if isinstance(model := named.get("model"), dict):
        named["model"] = _with_layers(model)
    spec, unread = _validated(named)
    problems += unread
    if spec is None:
        return None, problems
    if runs_script(spec):
        return _with_ranks(spec), problems
    spec, open_dp = _with_dp(spec)
    return spec, problems + open_dp


def _validated(document: dict[str, Any]) -> tuple[JobSpec | None, list[FieldProblem]]:
    try:
        return JobSpec.model_validate(document), []
    except ValidationError as error:
        problems, unread = explain(JobSpec, document, error.errors(include_url=False))
    readable = _without(document, unread)
    # Any name will do to read the rest with.
    readable = {"name": "unread", **readable}
    try:
        spec = JobSpec.model_validate(readable)
    except ValidationError:
        return None, problems
    if ("model", "preset") in unread:
        # What the other fields are without it was not meant by anybody.
        unread = {path for path in unread if path[0] != "model"} | {("model",)}
    for path in unread:
        spec = _with_unread(spec, path)
    return spec, problems


def _with_layers(model: dict[Any, Any]) -> dict[Any, Any]:
    """`num_layers`, as nearly every other program calls it, by the name that it has here."""
    if "num_layers" not in model or "layers" in model:
        return model
    return {"layers" if key == "num_layers" else key: each for key, each in model.items()}


def _without(section: dict[str, Any], paths: Collection[Sequence[str]]) -> dict[str, Any]:
    """`section` without the values at `paths`; the given one stays as it is."""
    gone = {path[0] for path in paths if len(path) == 1}
    inside: dict[str, list[Sequence[str]]] = {}
    for path in paths:
        if path[0] not in gone:
            inside.setdefault(path[0], []).append(path[1:])
    return {
        key: _without(value, inside[key]) if key in inside else value
        for key, value in section.items()
        if key not in gone
    }


def _with_unread(section: Any, path: Sequence[str]) -> Any:
    first, *rest = path
    if first not in type(section).model_fields:
        return section
    value = _with_unread(getattr(section, first), rest) if rest else Unread()
    return section.model_copy(update={first: value})


def _with_dp(spec: JobSpec) -> tuple[JobSpec, list[FieldProblem]]:
    """The spec with the number of replicas that its number of nodes gives, if it leaves it open."""
    try:
        if spec.resources.nodes is None or "dp" in spec.parallel.model_fields_set:
            return spec, []
        dp, problems = _replicas_on(spec, spec.resources.nodes)
    except UnreadError:
        return _with_unread(spec, ("parallel", "dp")), []
    if problems:
        return _with_unread(spec, ("parallel", "dp")), problems
    return spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"dp": dp})}), []


def _with_ranks(spec: JobSpec) -> JobSpec:
    """The spec of a script with its numbers of nodes and ranks where the trainer has them."""
    workload, resources, recovery = spec.workload, spec.resources, spec.recovery
    try:
        per_node = resources.workers_per_node or workload.workers_per_node or 1
        nodes = resources.nodes or workload.max_nodes or 1
        sizes = {"nodes": nodes, "workers_per_node": per_node}
        # Given, it must be what the ranks are: a spec that was written out has it.
        dp = spec.parallel.dp if "dp" in spec.parallel.model_fields_set else nodes * per_node
    except UnreadError:
        unread: JobSpec = _with_unread(spec, ("parallel", "dp"))
        return unread
    if "hang_timeout_s" not in recovery.model_fields_set:
        recovery = recovery.model_copy(update={"hang_timeout_s": HANG_TIMEOUT_S})
    return spec.model_copy(
        update={
            "parallel": spec.parallel.model_copy(update={"dp": dp}),
            "resources": resources.model_copy(update=sizes),
            "recovery": recovery,
        }
    )


def _replicas_on(spec: JobSpec, nodes: int) -> tuple[int, list[FieldProblem]]:
    """How many replicas fill so many nodes."""
    per_node = spec.resources.workers_per_node
    if per_node is None:
        problem = FieldProblem(
            field="resources.workers_per_node",
            message="is required when resources.nodes is given without parallel.dp",
        )
        return 0, [problem]
    tp, cp, pp = spec.parallel.tp, spec.parallel.cp, spec.parallel.pp
    ranks, per_replica = nodes * per_node, tp * cp * pp
    product = "tp x pp" if cp == 1 else "tp x cp x pp"
    if ranks % per_replica:
        near = " or ".join(map(str, multiples_beside(ranks, per_replica)))
        problem = FieldProblem(
            field="resources.nodes",
            message=f"is {shown(nodes)}; at {per_node} workers per node that is {shown(ranks)} "
            f"ranks, which replicas of {product} = {shown(per_replica)} ranks do not fill; "
            f"allowed: ranks in {{{near}, ...}}",
        )
        return 0, [problem]
    return ranks // per_replica, []
