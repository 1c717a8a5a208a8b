"""Variables whose values only a node knows: found there, or missed before any rank starts."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from checkpoint.storage.hung import MAX_HUNG_CALLS
from controller.agent.threads import run_blocking
from controller.agent.workers import script_variables
from controller.agent.workers.launch import StartRefusedError
from controller.agent.workers.preload import preload_of
from controller.agent.workers.script_variables import (
    MAX_VALUE_BYTES,
    variables_here,
    with_variables,
)
from outlast.failures import ErrorKind
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec


def spec_with(**env: Any) -> JobSpec:
    workload = {"command": ["python", "train.py"], "env": env, "preload": ["my_package"]}
    return parse_spec({"name": "job", "workload": workload})


def test_values_are_those_of_the_agent_and_of_files(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of file\n\n")
    given = spec_with(
        PLAIN="1", A={"from_env": "HERE"}, B={"from_file": str(tmp_path / "token")}, C=""
    )
    found = with_variables(given, {"HERE": "of agent"})
    values = {"PLAIN": "1", "A": "of agent", "B": "of file\n", "C": ""}
    assert found.workload.known_env == values
    assert given.workload.known_env == {"PLAIN": "1", "C": ""}
    preload = preload_of(found, "/usr/bin/python", tmp_path)
    assert "of agent" not in repr(preload)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "which cannot be read: No such file or directory"),
        (b"\xff\xfesecret", "which is not UTF-8 text"),
        (b"sec\0ret", "which has a NUL"),
        (b"secret" * MAX_VALUE_BYTES, "which is larger than 64 KiB"),
    ],
    ids=["missing", "binary", "nul", "large"],
)
def test_what_is_not_there_is_named_with_its_place_and_without_its_value(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    given = spec_with(A={"from_env": "NOT_SET"}, B={"from_file": str(path)})
    with pytest.raises(StartRefusedError) as caught:
        with_variables(given, {})
    assert caught.value.kind is ErrorKind.MISSING
    assert str(caught.value) == (
        "workload.env.A is from the variable NOT_SET of this node's agent, which is not set; "
        f"workload.env.B is from the file {path} of this node, {said}"
    )


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartRefusedError, match="cannot be read: Is a directory"):
        with_variables(spec_with(A={"from_file": str(tmp_path)}), os.environ)


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StartRefusedError, match=r"pipe of this node, which is not a regular file"):
        with_variables(spec_with(A={"from_file": str(tmp_path / "pipe")}), {})


def test_a_mount_that_does_not_answer_is_named_and_holds_up_no_other_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("value")
    hung = spec_with(A={"from_file": "/dead/token"})
    answers = threading.Event()
    read = script_variables._in_file

    def wait(path: Path) -> str:
        if path == Path("/dead/token"):
            answers.wait(60.0)
        return read(path)

    async def scenario() -> None:
        monkeypatch.setattr(script_variables, "_in_file", wait)
        said = r"workload.env.A from the file /dead/token: not read in 0.05 s; a mount of this node"
        # The last ones are not even begun: all threads that there may be hang.
        for _ in range(MAX_HUNG_CALLS + 2):
            with pytest.raises(StartRefusedError, match=said) as caught:
                await variables_here(hung, {}, within_s=0.05)
            assert caught.value.kind is ErrorKind.MISSING
        assert await run_blocking(lambda: 1, "preflight") == 1

    try:
        asyncio.run(scenario())
    finally:
        answers.set()
