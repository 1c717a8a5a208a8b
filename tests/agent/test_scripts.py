"""A script in a fork of the standby process is what it is under a new interpreter."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from outlast.script_command import Start, start_of
from outlast.worker_contract import WORKER_MARK
from tests.agent.scripts_of import FACTS, SCRIPTS, Ended, run_plain, run_script, script_of

# By chance.
DIFFERS = {"random"}


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OUTLAST_TEST": "seen", **more}


async def both(
    tmp_path: Path, command: list[str], *, cwd: Path | None = None, **more: str
) -> tuple[Ended, Ended]:
    """The same command under a new interpreter and in a fork."""
    folder = cwd or tmp_path
    plain = await run_plain(command, folder, environment(**more))
    forked = await run_script(tmp_path / "attempt", script_of(command, folder, environment(**more)))
    return plain, forked


def without_mark(facts: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in facts.items() if name not in DIFFERS}
    given = dict(facts["environment"])
    given.pop(WORKER_MARK, None)
    return {**kept, "environment": given}


@pytest.mark.parametrize(
    "command",
    [
        ["python", str(FACTS), "3"],
        ["python", "scripts/facts.py"],
        ["python", "-m", "scripts.facts", "7"],
        ["python", "-m", "facts"],
    ],
)
def test_a_fork_finds_what_a_new_interpreter_finds(tmp_path: Path, command: list[str]) -> None:
    more = {"PYTHONPATH": f"{SCRIPTS}:{tmp_path}"}
    plain, forked = asyncio.run(both(tmp_path, command, cwd=SCRIPTS.parent, **more))
    assert without_mark(forked.facts) == without_mark(plain.facts)
    assert forked.code == plain.code
    assert WORKER_MARK in forked.facts["environment"]
    assert forked.facts["random"] != plain.facts["random"]


@pytest.mark.parametrize(
    "command",
    [
        *(
            ["python", "ends.py", how]
            for how in (
                "return",
                "exit text",
                "exit none",
                "exit 300",
                "raise",
                "chained",
                "interrupt",
                "thread",
                "hook",
            )
        ),
        ["python", "-m", "ends", "raise"],
        ["python", "syntax.txt"],
        ["python", "missing.py"],
        ["python", "-m", "missing.module"],
    ],
    ids=" ".join,
)
def test_a_script_ends_as_under_a_new_interpreter(tmp_path: Path, command: list[str]) -> None:
    plain, forked = asyncio.run(both(tmp_path, command, cwd=SCRIPTS))
    assert forked.log == plain.log
    assert forked.code == plain.code


def test_a_failing_hook_is_said_with_what_it_was_called_for(tmp_path: Path) -> None:
    _, forked = asyncio.run(both(tmp_path, ["python", "ends.py", "bad hook"], cwd=SCRIPTS))
    assert "Error in sys.excepthook" in forked.log
    assert "ValueError: loss is not finite" in forked.log
    assert forked.code == 1


def test_torch_is_shared_and_has_the_threads_that_the_script_asks_for(tmp_path: Path) -> None:
    command = ["python", "facts.py"]
    for threads in ("1", "3"):
        script = script_of(command, SCRIPTS, environment(OMP_NUM_THREADS=threads))
        forked = asyncio.run(run_script(tmp_path / threads, script, "--preload=torch"))
        assert forked.facts["torch threads"] == int(threads), forked.log


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"PYTHONHASHSEED": "0"}, "PYTHONHASHSEED is read only by an interpreter that starts"),
        ({"MALLOC_ARENA_MAX": "1"}, "MALLOC_ARENA_MAX is read only"),
        ({"PYTHONPATH": "SHADOW"}, "is in the place of a module that is imported already"),
    ],
)
def test_what_a_fork_cannot_be_is_a_new_interpreter(
    tmp_path: Path, more: dict[str, str], says: str
) -> None:
    (tmp_path / "SHADOW").mkdir()
    (tmp_path / "SHADOW" / "socketserver.py").write_text("")
    (tmp_path / "SHADOW" / "argparse.py").write_text("")
    given = {
        name: value.replace("SHADOW", str(tmp_path / "SHADOW")) for name, value in more.items()
    }
    plain, forked = asyncio.run(both(tmp_path, ["python", "facts.py"], cwd=SCRIPTS, **given))
    assert says in forked.log
    assert without_mark(forked.facts) == without_mark(plain.facts)


def test_a_program_that_is_no_python_is_executed(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo $0 $OUTLAST_TEST; exit 5", "name"]
    _, forked = asyncio.run(both(tmp_path, command))
    assert (forked.log, forked.code) == ("name seen\n", 5)


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    forked = asyncio.run(run_script(tmp_path / "attempt", script_of(["no-such-program"], tmp_path)))
    assert "cannot start 'no-such-program': No such file or directory" in forked.log
    assert forked.code == 127


@pytest.mark.parametrize(
    ("command", "python", "executed", "within", "note"),
    [
        ("python a.py --x", "", "/env/bin/python -u a.py --x", "a.py --x", ""),
        (
            "python3 -u -m pack.mod 1",
            "",
            "/env/bin/python -u -u -m pack.mod 1",
            "-m pack.mod 1",
            "",
        ),
        ("/env/bin/python a.py", "", "/env/bin/python -u a.py", "a.py", ""),
        (
            "python -O a.py",
            "",
            "/env/bin/python -u -O a.py",
            "",
            "the interpreter has the option -O",
        ),
        ("python a.py", "/other/bin/python", "/other/bin/python -u a.py", "a.py", ""),
        ("python -c x", "/other/bin/python", "/other/bin/python -c x", "", ""),
        ("python -c x", "", "/env/bin/python -c x", "", ""),
        ("sh run.sh", "", "sh run.sh", "", ""),
    ],
)
def test_how_a_command_starts(
    command: str, python: str, executed: str, within: str, note: str
) -> None:
    start = start_of(command.split(), executable="/env/bin/python", python=python)
    assert start == Start(
        command=tuple(executed.split()),
        python=tuple(within.split()),
        note=note,
        is_foreign=executed.startswith("/other"),
    )
