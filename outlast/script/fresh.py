"""Making a fork of a process that has imported much look like a new interpreter.

A module that was imported before stays, as if the script had imported it. All else is put back:
our own packages are out of sight (`kept`), `sys.path` is the script's, generators of random numbers
have seeds of their own, signals their default. Where a fork cannot be what a new interpreter would
be, a reason is given, and the caller starts one.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import random
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from outlast.script.kept import is_same_file, keep_aside

# Read while an interpreter, its C library or a library of numbers starts; not again.
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "GLIBC_",
    "MALLOC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "NPY_",
    "TORCH_LOGS",
    "TORCH_TRACE",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)
# These are taken in by a fork as well. `-u` has the effect of the second.
_TAKEN_IN = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS"})
# Of the standby process itself. Threads are put back; a script that does not set the memory's
# has what is faster for all.
_STANDBYS = frozenset({"MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GLIBC_TUNABLES"})
_CUSTOMIZERS = frozenset({"sitecustomize", "usercustomize"})


def why_not(
    environment: Mapping[str, str], folders: Sequence[str], own_packages: Collection[str] = ()
) -> str:
    """Why a fork of this process is not what a new interpreter would be; "" when it is.

    `environment` is the script's; `folders` come first on its `sys.path`. `own_packages` are put
    aside.
    """
    names = {*environment, *os.environ}
    for name in sorted(names):
        if name in _TAKEN_IN or not name.startswith(_READ_AT_START):
            continue
        given = environment.get(name)
        if given is None and name in _STANDBYS:
            continue
        if given != os.environ.get(name):
            return f"{name} is read only by an interpreter that starts"
    if not environment.get("OMP_NUM_THREADS", "1").isdecimal():
        return "OMP_NUM_THREADS is not a number"
    shadowed = _shadowed(folders, own_packages)
    if shadowed:
        return f"{shadowed[1]} is in the place of a module that is imported already"
    return ""


def _shadowed(folders: Iterable[str], own_packages: Collection[str]) -> tuple[str, str] | None:
    """A module that is imported already and that the script would find elsewhere, and where."""
    imported = {name for name in sys.modules if "." not in name} | _CUSTOMIZERS
    imported -= set(own_packages)
    for folder in folders:
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in {name.partition(".")[0] for name in names} & imported:
            found = importlib.machinery.PathFinder.find_spec(name, [folder])
            # A folder without an `__init__.py` comes after all others.
            if found is None or not found.origin:
                continue
            loaded = getattr(sys.modules.get(name), "__file__", None)
            if loaded is None or not is_same_file(loaded, found.origin):
                return name, found.origin
            # It is found here, whatever a later folder has.
            imported.remove(name)
    return None


def script_folders(target: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What a new interpreter would put before all else on `sys.path`, the present folder known."""
    first = os.getcwd()
    if target[0] != "-m":
        is_file = os.path.isfile(target[0]) or not os.path.exists(target[0])
        place = os.path.realpath(target[0])
        first = os.path.dirname(place) if is_file else target[0]
    return [first, *_python_path(environment)]


def _python_path(environment: Mapping[str, str]) -> list[str]:
    given = environment.get("PYTHONPATH", "")
    return [os.path.abspath(each) for each in given.split(os.pathsep)] if given else []


def be_fresh(
    environment: Mapping[str, str], folders: Sequence[str], own_packages: Collection[str]
) -> None:
    """Be as an interpreter is that has just been started with this environment."""
    ours = set(_python_path(os.environ))
    others = [each for each in sys.path if each not in ours]
    first, *python_path = folders
    # As `site` does it: the first of two equal ones stays. What comes before is not looked at.
    sys.path[:] = [first, *dict.fromkeys([*python_path, *others])]
    importlib.invalidate_caches()
    keep_aside(own_packages)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    restore_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_IGN)
    _reseed()
    _set_threads(environment.get("OMP_NUM_THREADS"))
    _be_main_process()


def restore_signals() -> None:
    """Give every signal its default: what is ignored stays so in a program that is executed."""
    for number in signal.valid_signals():
        if signal.getsignal(number) is not signal.SIG_DFL and number not in (
            signal.SIGKILL,
            signal.SIGSTOP,
        ):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _reseed() -> None:
    random.seed()
    # It has the seed of the process that imported it.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _set_threads(given: str | None) -> None:
    """Have torch use as many threads as it would, had it been imported now."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    number = int(given) if given else _num_cores()
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        distributed.set_debug_level_from_env()


def _num_cores() -> int:
    """Cores that this process may use: of two threads of a core, torch uses one."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                cores.add(file.read())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def _be_main_process() -> None:
    """What `multiprocessing` noted when it was imported."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
        process.current_process().authkey = os.urandom(32)
