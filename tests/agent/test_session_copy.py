"""Our modules as another interpreter gets them."""

from __future__ import annotations

import ast
import os
import sys
import time
from pathlib import Path

import pytest

from controller.agent.workers import session_copy as copies
from outlast.startup import PACKAGES

# Of a session, beside the standard library; all but torch are done without where they are not.
LIBRARIES = frozenset({"torch", "numpy", "fsspec", "xxhash"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copies.session_copy(tmp_path_factory.mktemp("state"))


def test_nothing_is_needed_but_the_standard_library_and_torch() -> None:
    # An integration imports the library that it is for.
    roots = tuple(root for root in copies.ROOTS if root != "outlast.integrations")
    assert copies.needed(roots).others - sys.stdlib_module_names <= LIBRARIES


def test_a_package_stands_for_all_of_its_modules() -> None:
    found = copies.needed(("outlast.torchrun",)).modules
    assert {"outlast", "outlast.torchrun", "outlast.torchrun.parser"} <= found.keys()


def test_one_package_is_there_and_imports_nothing_of_ours_that_is_not(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["outlast"]
    for path in folder.rglob("*.py"):
        # The oldest Python that a script with a session may have.
        tree = ast.parse(path.read_bytes(), feature_version=(3, 10))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                tops = {alias.name.partition(".")[0] for alias in node.names}
                assert not tops & set(PACKAGES), f"{path}: from a package of ours takes `from`"
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.partition(".")[0] not in set(PACKAGES) - {"outlast"}, path


def test_all_of_it_runs_on_the_oldest_python(folder: Path) -> None:
    """Python 3.10 has no `enum.StrEnum`."""
    for path in folder.rglob("*.py"):
        assert path.name == "enums.py" or "from enum import StrEnum" not in path.read_text(), path


def test_a_copy_is_made_once(tmp_path: Path, folder: Path) -> None:
    state_dir = folder.parents[1]
    before = folder.stat().st_ino
    assert copies.session_copy(state_dir) == folder
    assert folder.stat().st_ino == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no draft is left"
    other = copies.session_copy(tmp_path)
    assert other.name == folder.name


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "session").write_text("in the way")
    with pytest.raises(OSError, match="session"):
        copies.session_copy(tmp_path)


def test_imports_lead_to_where_our_packages_stand() -> None:
    text = (
        '"""from checkpoint.core import names"""\n'
        "import json\n"
        "from checkpoint.core import (\n    names,\n)\n"
        "from outlast.ids import JobId\n"
        "def one():\n    from trainer.parallel.hosts import join_hosts\n"
    )
    assert copies.moved(text) == (
        '"""from checkpoint.core import names"""\n'
        "import json\n"
        "from outlast.own.checkpoint.core import (\n    names,\n)\n"
        "from outlast.ids import JobId\n"
        "def one():\n    from outlast.own.trainer.parallel.hosts import join_hosts\n"
    )


def test_a_copy_of_which_something_is_lost_is_made_anew(tmp_path: Path) -> None:
    folder = copies.session_copy(tmp_path)
    (folder / "outlast" / "session" / "__init__.py").write_text("")
    (folder / "outlast" / "enums.py").unlink()
    again = copies.session_copy(tmp_path)
    assert again == folder
    assert (folder / "outlast" / "session" / "__init__.py").read_text()
    assert (folder / "outlast" / "enums.py").exists()


def test_what_older_agents_left_is_deleted_when_a_copy_is_made(tmp_path: Path) -> None:
    parent = tmp_path / "session"
    ages_s = {"draft-a": 7200, "draft-b": 60, "older": 40 * 86400, "old": 86400}
    for name, age_s in ages_s.items():
        (parent / name).mkdir(parents=True)
        os.utime(parent / name, (time.time() - age_s,) * 2)
    folder = copies.session_copy(tmp_path)
    assert {path.name for path in parent.iterdir()} == {"draft-b", "old", folder.name}


def test_a_module_called_as_a_package_of_ours_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a" / "checkpoint").mkdir(parents=True)
    (tmp_path / "outlast.py").touch()
    assert not copies.shadows_ours([str(tmp_path / "a"), str(tmp_path)])
    (tmp_path / "a" / "checkpoint" / "__init__.py").touch()
    assert copies.shadows_ours([str(tmp_path), str(tmp_path / "a")])
    (tmp_path / "trainer.py").touch()
    assert copies.shadows_ours([str(tmp_path)])
