"""Every name that the journal has, held against a list: none may change without a word.

Rows of older journals have the names of their day, and a field under a name that nobody knows is
an error at the start of a controller. So whoever renames or removes one adds what older journals
call it, here found missing, to `controller.core.older_journals`.
"""

from __future__ import annotations

import json
import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from controller.core.changes import NodePut, StateChange
from controller.core.codec import decode_change, encode_change
from controller.core.older_journals import DROPPED, RENAMED
from controller.core.records import NodeRecord
from controller.core.states import NodeState
from controller.core.written import RecordChanged, RecordKind
from outlast.ids import NodeId

NAMES = Path(__file__).parent / "journals" / "names.json"


def _written() -> dict[str, type]:
    """Every record that a change can have in it, by name."""
    found: dict[str, type] = {}

    def visit(kind: Any) -> None:
        if get_origin(kind) in (Union, types.UnionType, tuple):
            for each in get_args(kind):
                visit(each)
        elif is_dataclass(kind) and isinstance(kind, type) and kind.__name__ not in found:
            found[kind.__name__] = kind
            for hint in get_type_hints(kind).values():
                visit(hint)

    visit(StateChange)
    return found


def _names(kind: type) -> list[str]:
    assert is_dataclass(kind)
    return [item.name for item in fields(kind) if item.metadata.get("written", True)]


def test_no_name_in_the_journal_changes_without_a_mapping() -> None:
    listed: dict[str, list[str]] = json.loads(NAMES.read_text())
    written = _written()
    problems = [
        f"{name}: older journals have records of this name; it must stay one"
        for name in listed
        if name not in written
    ]
    for name, kind in written.items():
        now = set(_names(kind))
        mapped = {*RENAMED.get(kind, {}), *DROPPED.get(kind, ())}
        for gone in sorted(set(listed.get(name, ())) - now - mapped):
            problems.append(
                f"{name}.{gone} is gone: add it to RENAMED or DROPPED in "
                f"controller/core/older_journals.py, then take it off {NAMES.name}"
            )
        new = sorted(now - set(listed.get(name, ())))
        if new:
            problems.append(f"{name}: add {', '.join(new)} to {NAMES.name}")
        problems += [
            f"{name}.{old} is mapped to {to}, which is no field"
            for old, to in RENAMED.get(kind, {}).items()
            if to not in now
        ]
        if mapped & now:
            problems.append(f"{name}: {', '.join(sorted(mapped & now))} has the name of an old one")
    assert not problems, "\n".join(problems)


def test_a_renamed_field_is_read_from_older_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole record, and of one of which the row has what changed."""
    node = NodeRecord(
        node=NodeId("n1"),
        state=NodeState.READY,
        since_s=0.0,
        reason="joined",
        incarnation="one",
        address="",
        rendezvous_port=0,
        workers=1,
    )
    data = json.loads(json.dumps(encode_change(NodePut(node=node))))
    data["node"]["mood"] = data["node"].pop("reason")
    change = {"is": "RecordChanged", "node": "n1", "values": {"mood": "good"}}
    with pytest.raises(ValueError, match=r"NodeRecord\.mood is no field"):
        decode_change(data)
    monkeypatch.setitem(RENAMED, NodeRecord, {"mood": "reason"})
    assert decode_change(data) == NodePut(node=node)
    assert decode_change(change) == RecordChanged(
        kind=RecordKind.NODE, key="n1", values=(("reason", "good"),)
    )
