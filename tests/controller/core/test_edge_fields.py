"""The table of rules for what agents send is complete."""

from __future__ import annotations

from controller.core.edge.fields import FIELDS
from controller.core.edge.walk import MESSAGES


def test_every_field_of_every_message_has_a_rule() -> None:
    missing = {
        f"{name}.{field.name}"
        for name, message in MESSAGES.items()
        for field in message.fields
        if field.name not in FIELDS.get(name, {})
    }
    assert not missing, f"say in controller/core/edge/fields.py what these may be: {missing}"
    unknown = {
        f"{name}.{field}"
        for name, fields in FIELDS.items()
        for field in fields
        if name not in MESSAGES or field not in MESSAGES[name].fields_by_name
    }
    assert not unknown
