"""Records how real scripts end in `recorded.json`.

From the root: `PYTHONPATH=$PWD python -m tests.agent.script_ends.record`.

Each end of `train.py` is run by a Python of its own, as `plain NAME`, and as `recorded NAME` under
`record` of `torch.distributed.elastic.multiprocessing.errors`; further commands as they stand here.
`forked NAME` is a fork of a standby process. Kept are the exit code, the log and the file that
`record` writes, with `/job` for the folder of the script, `/venv` for that of the interpreter and
`/python` for that of its standard library. Recorded with Python 3.11.7 and torch 2.13.0.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.ports import free_port
from tests.agent.script_ends import train
from tests.agent.scripts_of import run_script, script_of

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded.json"
# Of two ranks; the other one's end is kept where it is of interest.
_OF_TWO = {"lost_peer": 0, "error_with_peer": 1}
_COMMANDS = {
    "no script": ("python", "nothing.py"),
    "no module to run": ("python", "-m", "nothing.of.ours"),
    "package to run": ("python", "-m", "json"),
    "wrong argument": ("python", "train.py", "arguments", "--lr=fast"),
    "wrong argument of click": ("python", "train.py", "click_arguments", "--lr=fast"),
    "shell without the program": ("bash", "-c", "no-such-program --lr 1"),
    "shell and a text": ("bash", "-c", "./notes.txt"),
    "exception of a line": ("python", "-c", "1/0"),
}
_FORKED = {
    "no program": ("./no-such-program",),
    "program that is a text": ("./notes.txt",),
    "program of another machine": ("./program",),
    "no script": ("python", "nothing.py"),
    "no module to run": ("python", "-m", "nothing.of.ours"),
    "value_error": ("python", "train.py", "value_error"),
}


def main() -> None:
    """Run them all."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(FOLDER / "train.py", folder)
        (folder / "notes.txt").write_text("a text\n")
        (folder / "program").write_bytes(b"\x7fELF of another machine")
        (folder / "program").chmod(0o755)
        for end in _ends():
            command = ("python", "train.py", end)
            for kind in ("plain", "recorded"):
                rank = _OF_TWO.get(end)
                run = _run if rank is None else _run_two
                found[f"{kind} {end}"] = run(folder, command, kind == "recorded")
        for title, command in _COMMANDS.items():
            found[f"plain {title}"] = _run(folder, command, False)
        for title, command in _FORKED.items():
            ended = asyncio.run(run_script(folder / "attempt", script_of(command, folder)))
            found[f"forked {title}"] = _kept(folder, command, ended.code, ended.log, None)
            shutil.rmtree(folder / "attempt")
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


def _ends() -> list[str]:
    helpers = ("read_row", "progress_bar", "run", "arguments", "click_arguments")
    return [
        name
        for name, value in vars(train).items()
        if getattr(value, "__module__", "") == train.__name__
        and not isinstance(value, type)
        and name not in helpers
    ]


def _run(folder: Path, command: Sequence[str], is_recorded: bool) -> Mapping[str, Any]:
    ended = _start(folder, command, _environment(folder, 0, 1, 0, is_recorded))
    log = ended.communicate(timeout=120)[0].decode()
    return _kept(folder, command, ended.returncode, log, folder / "error-0.json")


def _run_two(folder: Path, command: Sequence[str], is_recorded: bool) -> Mapping[str, Any]:
    port = free_port()
    both = [
        _start(folder, command, _environment(folder, rank, 2, port, is_recorded)) for rank in (0, 1)
    ]
    logs = [each.communicate(timeout=120)[0].decode() for each in both]
    rank = _OF_TWO[command[-1]]
    error = folder / f"error-{rank}.json"
    kept = _kept(folder, command, both[rank].returncode, logs[rank], error)
    (folder / f"error-{1 - rank}.json").unlink(missing_ok=True)
    return kept


def _environment(
    folder: Path, rank: int, world_size: int, port: int, is_recorded: bool
) -> dict[str, str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if is_recorded:
        environment["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error-{rank}.json")
    return environment


def _start(
    folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    given = [sys.executable, "-u", *command[1:]] if command[0] == "python" else list(command)
    return subprocess.Popen(
        given,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _kept(
    folder: Path, command: Sequence[str], code: int, log: str, error: Path | None
) -> Mapping[str, Any]:
    is_there = error is not None and error.exists()
    document = error.read_text() if error is not None and is_there else None
    if error is not None and is_there:
        error.unlink()
    return {
        "command": list(command),
        "code": code,
        "log": [_neutral(folder, line) for line in log.split("\n")],
        "error_file": None if document is None else _neutral(folder, document),
    }


def _neutral(folder: Path, text: str) -> str:
    names = {str(folder): "/job", sys.prefix: "/venv", sys.base_prefix: "/python"}
    for path, name in names.items():
        text = text.replace(path, name)
    return text


if __name__ == "__main__":
    main()
