"""What `outlast up` prints once it serves."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from controller.app import Running
from controller.options import Options
from outlast.cli.errors import ExitCode
from outlast.cli.serve import ready_lines
from outlast.ids import NodeId
from tests.cli.running import outlast

ROOT = Path(__file__).parents[2]
RUNNING = Running(grpc="127.0.0.1:1", http="127.0.0.1:2", term=1)


def example(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The spec that the printed command submits, for somebody who is in `folder`."""
    monkeypatch.chdir(folder)
    options = Options(state_dir=folder, local_nodes=4, standby=1)
    (found,) = re.findall(r"outlast submit (\S+) --watch", "\n".join(ready_lines(options, RUNNING)))
    return str(found)


def test_the_job_to_begin_with_can_be_submitted_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = outlast("plan", example(tmp_path, monkeypatch), "--state-dir", str(tmp_path))
    assert done.returncode == ExitCode.OK, done.stderr
    assert "gpt-tiny" in done.stdout


def test_nodes_of_an_earlier_controller_are_not_called_starting(tmp_path: Path) -> None:
    options = Options(state_dir=tmp_path, local_nodes=4, standby=1)
    said = ready_lines(options, replace(RUNNING, adopted=3, dead=(NodeId("node-1"),)))
    assert said[2] == "3 local node(s) run on from before, 1 are starting."
    assert said[3] == "Dead: node-1; Ctrl-C here and then `outlast up` brings back all."
    fresh = ready_lines(options, RUNNING)[2]
    assert fresh == "4 local node(s) of 1 worker(s) and 1 standby are starting."


def test_in_a_clone_it_is_the_one_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert example(ROOT, monkeypatch) == "examples/gpt-tiny.yaml"
