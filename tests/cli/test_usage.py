"""Help and usage errors speak of what users write, not of the library that parses it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from outlast.cli.errors import ExitCode
from tests.cli.running import TIMEOUT_S, outlast
from tests.cli.test_hints import COMMANDS

_OF_PYTHON = re.compile(r"<[^>]*>|\b(?:int|float|str|bool|NoneType)\b|list\[|x[<>]=|\bTEXT\b")


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_help_names_no_type_of_python(command: str) -> None:
    done = outlast(*command.split(), "--help")
    assert done.returncode == ExitCode.OK
    assert not _OF_PYTHON.findall(done.stdout)


def test_state_of_an_agent_is_that_of_its_node() -> None:
    help_text = " ".join(outlast("agent", "--help").stdout.split())
    assert "--state-dir DIR Where this node keeps logs" in help_text


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_option_with_a_value_names_it(command: str) -> None:
    nameless = [
        parameter.opts[0]
        for parameter in COMMANDS[command].params
        if not getattr(parameter, "is_flag", False) and parameter.metavar is None
    ]
    assert not nameless


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("logs --attempt -1", "--attempt is -1; allowed: a whole number, 0 or more, or all"),
        ("logs --attempt x", "--attempt is 'x'; allowed: a whole number, 0 or more, or all"),
        ("logs --rank 1.5", "--rank is 1.5; allowed: a whole number, -1 or more"),
        ("ckpt sweep job --idle-s nan", "--idle-s is 'nan'; allowed: a number, 0 or more"),
        ("ckpt verify job 3 last", "STEP is 'last'; allowed: a whole number, 0 or more"),
        ("ckpt rm job -- -4", "STEP is -4; allowed: a whole number, 0 or more"),
        ("plan spec --kernels 2", "--kernels is 2; allowed: a number from 0.01 to 1.0"),
        ("up --nodes 0", "--nodes is 0; allowed: a whole number, 1 or more"),
        ("demo --seed x", "--seed is 'x'; allowed: a whole number\n"),
    ],
)
def test_a_number_that_is_refused_is_named_with_what_is_allowed(
    arguments: str, expected: str
) -> None:
    done = outlast(*arguments.split())
    assert done.returncode == ExitCode.BAD_INPUT
    assert f"Error: Invalid value: {expected}" in done.stderr
    assert "Usage: outlast" in done.stderr


@pytest.mark.parametrize("command", ["show", "verify", "pin", "rm"])
def test_an_argument_that_is_written_as_an_option(command: str) -> None:
    done = outlast("ckpt", command, "job", "--step", "7")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "No such option: --step; write STEP alone, without --step" in done.stderr
    assert "Possible options" not in done.stderr


def test_a_misspelt_option_has_the_one_that_was_meant() -> None:
    assert "--attempt" in outlast("logs", "--atempt", "4").stderr.splitlines()[-1]


_LONG = "parallel: {tp: 3, pp: 5, layer_split: [9]}\nmodel: {hidden: 100}\n"


@pytest.mark.parametrize(
    ("arguments", "stdin"), [("plan -", _LONG), ("ckpt verify job --step 7", "")]
)
def test_errors_wrap_at_the_width_of_the_terminal(arguments: str, stdin: str) -> None:
    shown = _on_terminal(*arguments.split(), stdin=stdin, columns=60)
    assert max(len(line) for line in shown) <= 60
    # In a pipe each problem is one line.
    lines = outlast(*arguments.split(), stdin=stdin).stderr.splitlines()
    assert max(len(line) for line in lines) > 80
    assert " ".join(" ".join(shown).split()) == " ".join(" ".join(lines).split())


def _on_terminal(*arguments: str, stdin: str, columns: int) -> list[str]:
    """What a command writes to standard error where that is a terminal."""
    ours, theirs = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-m", "outlast.cli.main", *arguments],
            input=stdin.encode(),
            stdout=subprocess.DEVNULL,
            stderr=theirs,
            timeout=TIMEOUT_S,
            env={**os.environ, "COLUMNS": str(columns)},
            check=False,
        )
        os.close(theirs)
        text = b""
        # A terminal that nothing holds open any more ends in an error.
        while chunk := _read(ours):
            text += chunk
    finally:
        os.close(ours)
    return text.decode().splitlines()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""
