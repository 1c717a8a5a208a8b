"""Our packages in the fork that a script becomes: out of sight, and given back if it wants them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import outlast
from outlast.script.fresh import why_not

SCRIPT = """
import sys

import outlast.session.process as before
from outlast.script.kept import keep_aside

spec = before.__spec__
keep_aside({"outlast", "trainer"})
assert not [name for name in sys.modules if name.partition(".")[0] in ("outlast", "trainer")]
sys.path[:0] = sys.argv[1:]
"""
IS_GIVEN_BACK = """
import outlast.session.process as after
from outlast.session.process import TIMEOUT_S

assert after is before, "imported once more"
assert after.__spec__ is spec
assert sys.modules["outlast"].session.process is before
# What had not been imported is found as ever.
import outlast.torchrun.flags
"""
IS_THE_USERS = """
import outlast
assert outlast.WHOSE == "the user's", outlast
try:
    import outlast.session
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("ours came through")
"""


def run(code: str, *folders: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + code, *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_what_was_imported_is_given_back_as_it_is() -> None:
    run(IS_GIVEN_BACK)


def test_a_package_of_the_users_own_with_the_name_comes_first(tmp_path: Path) -> None:
    (tmp_path / "outlast.py").write_text('WHOSE = "the user\'s"\n')
    run(IS_THE_USERS, tmp_path)


def test_a_later_folder_takes_nothing_that_an_earlier_one_has(tmp_path: Path) -> None:
    other = tmp_path / "outlast"
    other.mkdir()
    (other / "__init__.py").touch()
    ours = Path(outlast.__file__).parents[1]
    assert why_not(os.environ, [str(ours), str(tmp_path)]) == ""
    assert str(other) in why_not(os.environ, [str(tmp_path), str(ours)])
