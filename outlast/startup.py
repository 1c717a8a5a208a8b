"""How a process of ours starts: with our own packages, and which signals end it.

Python puts the current folder before everything that is installed, so a user's `trainer.py`
or `checkpoint/` there would be imported in the place of ours. Every process that we start gets
`-P`, which leaves the folder out, or does the same itself where scripts of users are forked from
it; `PYTHONPATH` stays as it is. Each one checks, too.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from outlast.errors import FatalError

PACKAGES = ("outlast", "controller", "trainer", "checkpoint", "diagnostics")

# As `python -P -m MODULE`, with the module as the first argument. `-P` would be in the `sys.flags`
# of forks, which nothing changes later, and so in the options of interpreters that these start.
_RUN_MODULE = """
import sys
if not getattr(sys.flags, 'safe_path', False):
    del sys.path[0]
import runpy
runpy._run_module_as_main(sys.argv.pop(1))
"""


class ShadowedError(FatalError):
    """A package of ours would be imported from a place of somebody else's."""


def python_command(module: str, *, executable: str = sys.executable) -> tuple[str, ...]:
    """The start of a command that runs one of our modules, whatever the current folder holds."""
    return (executable, *_alone(executable), "-P", "-m", module)


def forking_command(module: str, *, executable: str = sys.executable) -> tuple[str, ...]:
    """`python_command` of a module whose forks become scripts: with no option that they see."""
    return (executable, *_alone(executable), "-c", _RUN_MODULE, module)


def _alone(executable: str) -> tuple[str, ...]:
    """`-E` for our own interpreter where this process has it: PYTHONPATH and PYTHONHOME of a job's
    image are of the image's Python."""
    return ("-E",) if sys.flags.ignore_environment and executable == sys.executable else ()


def check_packages(packages: Iterable[str] = PACKAGES) -> None:
    """Check that all packages are of this installation.

    Raises:
        ShadowedError: one is found elsewhere, or nowhere; names the file in its place.
    """
    home = Path(__file__).resolve().parent.parent
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ShadowedError(f"Outlast's package {name!r} is not installed beside {home}")
        # A folder without `__init__.py` has no origin.
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        found = Path(places[0]).resolve()
        if found.parent.parent != home or found.name != "__init__.py":
            raise ShadowedError(
                f"{found} is in the place of Outlast's own package {name!r} ({home / name}): "
                "rename it, run from another folder, or take its folder out of PYTHONPATH"
            )


def stop_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask a process to end in order; not SIGHUP where `nohup` has it ignored."""
    always = (signal.SIGINT, signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return always
    return (*always, signal.SIGHUP)
