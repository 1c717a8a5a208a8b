"""Running the `outlast` command: as a process of its own, or faster in this one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

from outlast.cli.main import main

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def outlast_process(*arguments: str, stdin: str = "", **environment: str) -> Done:
    """Run `outlast ARGUMENTS` to its end in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "outlast.cli.main", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=_environment(environment),
        check=False,
    )
    return Done(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


class Terminal(io.StringIO):
    """Standard input where a person types."""

    def isatty(self) -> bool:
        return True


def outlast(
    *arguments: str, stdin: str = "", is_terminal: bool = False, **environment: str
) -> Done:
    """The same in this process, which has imported everything already."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        mock.patch.dict(os.environ, _environment(environment), clear=True),
        mock.patch.object(sys, "argv", ["outlast", *arguments]),
        mock.patch.object(sys, "stdin", (Terminal if is_terminal else io.StringIO)(stdin)),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return Done(
        returncode=code if isinstance(code, int) else 0,
        stdout=out.getvalue(),
        stderr=err.getvalue(),
    )


def outlast_json(*arguments: str, **environment: str) -> Any:
    """The JSON document that a command prints; it must succeed."""
    done = outlast(*arguments, "--json", **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _environment(changes: dict[str, str]) -> dict[str, str]:
    """This process's, with no controller configured or logged in to by accident."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST_")}
    return {**kept, "COLUMNS": "100", "XDG_CONFIG_HOME": os.devnull, **changes}
