"""A user's folder may hold modules that are called like ours: the product runs all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.startup import PACKAGES, ShadowedError, check_packages, python_command
from tests.agent.conftest import StartAgent
from tests.agent.harness import REPOSITORY, FakeController, start_job

# Ours, and of those that everything imports.
NAMES = ("trainer", "controller", "diagnostics", "outlast", "random", "json", "grpc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's project."""
    project = tmp_path / "project"
    (project / "checkpoint").mkdir(parents=True)
    (project / "checkpoint" / "__init__.py").write_text("raise SystemExit('the user-s')\n")
    for name in NAMES:
        (project / f"{name}.py").write_text("raise SystemExit('the user-s')\n")
    return project


def test_node_started_in_a_folder_with_a_trainer_py_runs_workers(
    controller: FakeController, start_agent: StartAgent, folder: Path
) -> None:
    start_agent(controller.start(), cwd=folder)
    start_job(controller)
    controller.progress("job", 1)


def run(folder: Path, *command: str, path: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_command_runs_in_such_a_folder(folder: Path) -> None:
    installed = Path(sys.executable).with_name("outlast")
    for command in ((str(installed),), python_command("outlast.cli.main")):
        done = run(folder, *command, "--version", path=str(REPOSITORY))
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("outlast ")


def test_variables_for_another_python_are_kept_from_all_that_is_started(tmp_path: Path) -> None:
    """As in the image of a job: with `-E` our Python does not heed them, nor do its children."""
    (tmp_path / "broken.py").write_text("")
    told = (
        "import sys; from outlast.startup import forking_command, python_command; "
        "print(python_command('m'), forking_command('m')[1], python_command('m', executable='/x'))"
    )
    command = (sys.executable, "-E", "-P", "-c", told)
    done = run(tmp_path, *command, path=str(tmp_path))
    wanted = (sys.executable, "-E", "-P", "-m", "m")
    assert done.stdout.strip() == f"{wanted} -E {('/x', '-P', '-m', 'm')}"


@pytest.mark.parametrize("module", ["outlast.cli.main", "controller.agent"])
def test_file_in_the_place_of_a_package_is_named(tmp_path: Path, module: str) -> None:
    (tmp_path / "trainer.py").touch()
    path = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
    done = run(tmp_path, *python_command(module), "--help", path=path)
    assert done.returncode == 2
    assert f"{tmp_path / 'trainer.py'} is in the place of Outlast's own package" in done.stderr
    assert "PYTHONPATH" in done.stderr


def test_demo_of_ones_own_stops_only_the_demo(tmp_path: Path) -> None:
    (tmp_path / "demo.py").touch()
    path = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
    command = python_command("outlast.cli.main")
    assert run(tmp_path, *command, "--help", path=path).returncode == 0
    done = run(tmp_path, *command, "demo", path=path)
    assert done.returncode == 2
    assert f"{tmp_path / 'demo.py'} is in the place of Outlast's own package" in done.stderr


def test_folder_without_an_init_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_packages(PACKAGES)
    with pytest.raises(ShadowedError, match="'no_such_package' is not installed"):
        check_packages(("no_such_package",))
    (tmp_path / "a_namespace").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ShadowedError, match=f"{tmp_path / 'a_namespace'} is in the place"):
        check_packages(("a_namespace",))
