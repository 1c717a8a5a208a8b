"""What every section of a job spec has in common: how strictly its fields are read."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A mapping of the spec; unknown fields, infinities and NaN are refused.

    Numbers may be written as text: YAML reads 1e-3 as text, and a request's numbers are
    doubles, so large whole numbers come as text too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_yes_or_no(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would read `tp: true` as 1."""
        given = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(item, bool) for item in given):
            assert info.field_name is not None, "a validator of fields has a field"
            if not _takes_bool(cls.model_fields[info.field_name].annotation):
                raise ValueError("not a value for yes or no")
        return value


def _takes_bool(annotation: Any) -> bool:
    if annotation is bool:
        return True
    if get_origin(annotation) is Literal:
        return any(isinstance(value, bool) for value in get_args(annotation))
    return any(_takes_bool(inner) for inner in get_args(annotation))
