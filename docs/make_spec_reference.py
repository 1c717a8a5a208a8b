"""Write the reference page of the job spec from its model, so that it cannot drift.

`python docs/make_spec_reference.py` rewrites docs/reference/spec.md; a test
compares it with what the model says now.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from outlast.spec import JobSpec

PAGE = Path(__file__).parent / "reference" / "spec.md"

_HEAD = """# The job spec

Generated from `outlast/spec/` by `python docs/make_spec_reference.py`. A spec is YAML or JSON;
only `name` is required. `outlast plan job.yaml` checks one and prints what it will need;
`outlast schema` prints the JSON schema for editors. Every problem of a spec is reported at once,
with its field and what is allowed.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, _section("Top level", JobSpec)]
    for name, field in JobSpec.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            parts.append(_section(f"`{name}`", kind))
            for inner_name, inner in kind.model_fields.items():
                inner_kind = inner.annotation
                if isinstance(inner_kind, type) and issubclass(inner_kind, BaseModel):
                    parts.append(_section(f"`{name}.{inner_name}`", inner_kind))
    return "\n".join(parts)


def _section(title: str, model: type[BaseModel]) -> str:
    lines = [f"## {title}", ""]
    if model is not JobSpec and model.__doc__:
        lines += [model.__doc__.splitlines()[0], ""]
    lines += ["| field | default | meaning |", "|---|---|---|"]
    schema: dict[str, Any] = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            continue
        meaning = f"{field.description or ''}{_allowed(schema[name])}".strip()
        lines.append(f"| `{name}` | {_default(field)} | {meaning} |")
    return "\n".join([*lines, ""])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return ""
    # YAML's words for true and false.
    text = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
    return f"`{text}`"


def _allowed(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return f" One of {', '.join(f'`{value}`' for value in schema['enum'])}."
    words = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[key]:g}" for key, sign in words.items() if key in schema]
    return f" ({', '.join(bounds)})" if bounds else ""


if __name__ == "__main__":
    PAGE.write_text(page())
