"""Every flag of `outlast` that a message or a page names exists, and so does its command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from outlast.cli.main import app

ROOT = Path(__file__).parents[2]
_CALL = re.compile(r"`(outlast [^`]*)`")
_LINE = re.compile(r"^\s*(?:\$ )?(?:nohup )?(outlast .*)$", re.MULTILINE)
_FLAG = re.compile(r"(?<![-\w/.])--[a-z][a-z0-9-]*")
# Of other programs, where a page or a message speaks of those.
_OTHERS = {
    *("--no-install-recommends", "--find-links", "--no-index", "--no-deps", "--upgrade"),
    *("--newest", "--session", "--pid", "--shm-size", "--gpus", "--kube-"),
    *(
        "--set-file",
        "--set-string",
        "--namespace",
        "--create-namespace",
        "--tail",
        "--all-namespaces",
        "--encoding",
        "--template",
    ),
}


def commands() -> dict[str, click.Command]:
    """`nodes cordon` and the like, and the program itself under ""."""
    found: dict[str, click.Command] = {}

    def visit(name: str, command: click.Command) -> None:
        found[name] = command
        for word, below in getattr(command, "commands", {}).items():
            visit(f"{name} {word}".strip(), below)

    visit("", typer.main.get_command(app))
    return found


COMMANDS = commands()
FLAGS = {
    flag
    for command in COMMANDS.values()
    for parameter in command.params
    for flag in (*parameter.opts, *parameter.secondary_opts)
} | {"--help"}


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return [page for page in found if page.name != "cli.md"]


def sources() -> list[Path]:
    """Where messages to users are."""
    return [
        *(ROOT / "outlast").rglob("*.py"),
        *(ROOT / "controller").rglob("*.py"),
        *(ROOT / "checkpoint").rglob("*.py"),
        *(ROOT / "trainer").rglob("*.py"),
        *(ROOT / "examples").rglob("*.yaml"),
    ]


def calls(text: str, *, lines: bool) -> Iterator[list[str]]:
    """The words behind `outlast` of every command that a text shows."""
    joined = text.replace("\\\n", " ")
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", joined, re.MULTILINE | re.DOTALL)
    found = [*_CALL.findall(joined)]
    for line in (each for block in blocks if lines for each in _LINE.findall(block)):
        found += re.split(r"&&|\||;", line)[:1]
    for call in found:
        # Code of a page may break a line inside of a message.
        words = re.sub(r"[\"']\s*[f]?[\"']", "", call).partition("#")[0].split()
        yield words[1:]


def problem(words: list[str]) -> str:
    """What is wrong with a command, "" if nothing is."""
    name = ""
    for word in words:
        if f"{name} {word}".strip() not in COMMANDS:
            break
        name = f"{name} {word}".strip()
    if not name and words and re.fullmatch(r"[a-z]+", words[0]):
        return f"there is no command {words[0]}"
    command = COMMANDS[name]
    # `outlast nodes` is `outlast nodes list`.
    listing = COMMANDS.get(f"{name} list")
    known = {
        flag
        for each in (command, listing)
        if each is not None
        for parameter in each.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help"}
    # What stands behind a script is its own.
    scripts = [number for number, word in enumerate(words) if word.endswith(".py")]
    for word in words[: scripts[0] if name == "run" and scripts else None]:
        flag = _FLAG.match(word)
        if flag and flag.group() not in known:
            return f"{name or 'outlast'} has no {flag.group()}"
    return ""


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_a_page_exist_with_their_flags(page: Path) -> None:
    found = [problem(words) for words in calls(page.read_text(), lines=True)]
    assert not [each for each in found if each]


def test_commands_in_messages_exist_with_their_flags() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {wrong}"
        for path in sources()
        for words in calls(path.read_text(), lines=False)
        if (wrong := problem(words))
    ]
    assert not found


def test_flags_in_messages_of_the_controller_are_those_of_outlast() -> None:
    """What it says is read by users of `outlast`, not of the programs below it."""
    found = []
    for path in (ROOT / "controller").rglob("*.py"):
        if path.name == "__main__.py" or {"agent", "sim"} & set(path.parts):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if " " not in line.strip() or "add_argument" in line or '"--' in line:
                continue
            found += [
                f"{path.relative_to(ROOT)}:{number}: {flag}"
                for flag in _FLAG.findall(line)
                if flag not in FLAGS | _OTHERS
            ]
    assert not found
