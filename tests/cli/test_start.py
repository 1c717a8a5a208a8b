"""What the command costs before it does anything, and how it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outlast.cli.errors import ExitCode
from tests.cli.running import outlast

HEAVY = ("torch", "grpc", "pydantic", "rich", "yaml", "numpy", "asyncio", "sqlalchemy")
NEED_A_CONTROLLER = (
    ("jobs",),
    ("status", "x"),
    ("watch", "x"),
    ("logs", "x"),
    ("cancel", "x"),
    ("pause", "x"),
    ("resume", "x"),
    ("incidents",),
    ("incidents", "show", "x"),
    ("nodes",),
    ("nodes", "cordon", "x"),
    ("nodes", "uncordon", "x"),
    ("nodes", "drain", "x"),
    ("diagnose",),
)


def test_help_imports_nothing_heavy() -> None:
    """The design: `outlast --help` answers in under 0.3 s, so it must not import these."""
    code = (
        "import sys\n"
        "sys.argv = ['outlast', '--help']\n"
        "from outlast.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "HEAVY []" in done.stdout
    assert "Usage: outlast" in done.stdout


def test_version_is_printed() -> None:
    done = outlast("--version")
    assert done.returncode == ExitCode.OK
    assert done.stdout.startswith("outlast 0.")


def test_unknown_command_is_bad_usage() -> None:
    done = outlast("no-such-thing")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "no-such-thing" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("n0", "--job", "gpt"), ("nodes", "job")),
        (("--list", "n0"), ("--list", "n0")),
        (("--list", "--nodes", "n0,n1"), ("--list", "n0, n1")),
        (("--list", "--show", "r1"), ("--list", "--show r1")),
        (("--show", "r1", "--nodes", "n0"), ("--show r1", "n0")),
        (("--show", "r1", "--job", "gpt"), ("--show r1", "--job gpt")),
    ],
    ids=lambda value: " ".join(value),
)
def test_diagnose_refuses_what_cannot_be_meant_together(
    arguments: tuple[str, ...], named: tuple[str, ...], tmp_path: Path
) -> None:
    done = outlast("diagnose", *arguments, "--state-dir", str(tmp_path))
    assert done.returncode == ExitCode.BAD_INPUT
    assert all(words in done.stderr for words in named), done.stderr


@pytest.mark.parametrize("arguments", NEED_A_CONTROLLER[::3], ids=" ".join)
def test_without_a_controller_the_message_says_how_to_start_one(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = outlast(*arguments, "--state-dir", str(tmp_path))
    assert done.returncode == ExitCode.NO_CONTROLLER
    assert "outlast up" in done.stderr
    assert "OUTLAST_CONTROLLER" in done.stderr
    assert "Traceback" not in done.stderr


def test_controller_that_does_not_answer_is_no_controller() -> None:
    # Port 9 (discard) is served by nobody on a developer's machine.
    done = outlast("jobs", OUTLAST_CONTROLLER="127.0.0.1:9")
    assert done.returncode == ExitCode.NO_CONTROLLER
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_observe_without_prometheus_says_how_to_get_it(tmp_path: Path) -> None:
    done = outlast("up", "--observe", "--state-dir", str(tmp_path), PATH=str(tmp_path))
    assert done.returncode == ExitCode.BAD_INPUT
    assert "apt-get install" in done.stderr
    assert "Traceback" not in done.stderr
