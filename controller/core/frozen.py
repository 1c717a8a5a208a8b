"""`dataclasses.replace`, four times as fast, for records that never change.

The machine replaces a record for everything that it decides. `dataclasses.replace` goes through
the fields in Python and then through `__init__`, which sets each of them by its name: 4.1 us for an
incident of 25 fields, 1.0 us here, where values go from slot to slot. Callers are type-checked as
those of `dataclasses.replace` are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace as replace
else:

    def replace(record, /, **changes):
        """The record with these values instead of its own.

        Raises:
            TypeError: it has no such field.
        """
        copy, setters = _copier(type(record))
        if copy is None:
            return dataclasses.replace(record, **changes)
        new = copy(record)
        for name, value in changes.items():
            if name not in setters:
                raise TypeError(f"{type(record).__name__} has no field {name!r}")
            setters[name](new, value)
        return new


_Setter = Callable[[Any, object], None]


@cache
def _copier(kind: type[Any]) -> tuple[Callable[[Any], Any] | None, dict[str, _Setter]]:
    """What copies a record of this kind, and what sets each field of the copy.

    No copier for those whose `__init__` does more than set fields, or that have no slots.
    """
    items = dataclasses.fields(kind)
    if "__slots__" not in vars(kind) or hasattr(kind, "__post_init__"):
        return None, {}
    setters: dict[str, _Setter] = {item.name: getattr(kind, item.name).__set__ for item in items}
    # Written out, as dataclasses write `__init__`: a loop takes twice as long.
    lines = [f"    set_{name}(new, record.{name})" for name in setters]
    source = "\n".join(["def copy(record):", "    new = make(kind)", *lines, "    return new"])
    names: dict[str, Any] = {f"set_{name}": setter for name, setter in setters.items()}
    names |= {"make": object.__new__, "kind": kind}
    exec(source, names)  # field names are identifiers
    return names["copy"], setters
