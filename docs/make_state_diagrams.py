"""Draw the state diagrams from the tables, so that the documentation cannot drift.

`python docs/make_state_diagrams.py` rewrites docs/reference/states.md, and the diagrams in
docs/explanation/recovery.md; a test compares both with what the tables say now.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from controller.core.states import INCIDENT_TRANSITIONS, JOB_TRANSITIONS, NODE_TRANSITIONS

PAGE = Path(__file__).parent / "reference" / "states.md"
EXPLANATION = Path(__file__).parent / "explanation" / "recovery.md"

_HEAD = """# States

Generated from the tables in `controller/core/states.py` by
`python docs/make_state_diagrams.py`. What triggers each transition is in
`job_progression.py`, `acting.py` and `requests.py` (jobs), `fleet.py` and `nodes.py`
(nodes) and `incidents.py`, all in `controller/core`.
"""

_TABLES: tuple[tuple[str, Mapping[StrEnum, tuple[StrEnum, ...]]], ...] = (
    ("Jobs", JOB_TRANSITIONS),
    ("Nodes", NODE_TRANSITIONS),
    ("Incidents", INCIDENT_TRANSITIONS),
)


def diagram(table: Mapping[StrEnum, tuple[StrEnum, ...]]) -> str:
    """A Mermaid state diagram of a transition table; the first state is the initial one."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(table))}"]
    for start, ends in table.items():
        lines += [f"    {start} --> {end}" for end in ends]
        if not ends:
            lines.append(f"    {start} --> [*]")
    return "\n".join([*lines, "```"])


def page() -> str:
    """The whole page."""
    parts = [f"## {title}\n\n{diagram(table)}\n" for title, table in _TABLES]
    return "\n".join([_HEAD, *parts])


def explanation() -> str:
    """The explanation of recovery as it is, with the diagrams of today."""
    text = EXPLANATION.read_text()
    for title, table in _TABLES:
        begin, end = f"<!-- {title}: generated -->\n", "\n<!-- end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{diagram(table)}{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
    EXPLANATION.write_text(explanation())
