"""One self-contained web page: title, outcome, a few large figures, and a body."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template


def page(
    *,
    title: str,
    subtitle: str,
    outcome: str,
    is_good: bool,
    figures: Sequence[tuple[str, str]],
    body: Sequence[str],
) -> str:
    """The page. `figures` are (name, value); the body is HTML, everything else is escaped."""
    shown = (f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in figures)
    return template("page.html").substitute(
        style=style(),
        title=escape(title),
        subtitle=escape(subtitle),
        outcome=escape(outcome),
        outcome_class="good" if is_good else "bad",
        figures="".join(shown),
        body="\n".join(body),
    )


def template(name: str) -> Template:
    """A page to be filled in."""
    return Template(_read(name))


def style() -> str:
    """How every page looks; it goes into the page, which stays one file."""
    return _read("style.css")


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int = 0) -> str:
    """A table; so many columns after the first are flush right, as numbers are."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = (
        "<tr>"
        + "".join(_cell(cell, 0 < place <= numbers) for place, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(text: str, is_number: bool) -> str:
    kind = ' class="number"' if is_number else ""
    return f"<td{kind}>{escape(text)}</td>"


def _read(name: str) -> str:
    return resources.files("outlast.cli").joinpath("templates", name).read_text("utf-8")
