"""What must be true of the repository as a whole."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import protostubs

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("outlast", "controller", "trainer", "checkpoint", "diagnostics", "demo")
CORES = ("controller/core", "trainer/core", "checkpoint/core", "diagnostics/core")
# Modules of `outlast` that a core may use: they are values and vocabulary.
CORE_VOCABULARY = ("blackbox", "chosen", "clock", "enums", "errors", "failures", "flops", "ids")
CORE_VOCABULARY += ("layout", "replica_shift", "sizing", "skipped", "worker_contract")
FORBIDDEN_IN_CORES = {
    *("asyncio", "concurrent", "logging", "multiprocessing", "random", "secrets"),
    *("socket", "subprocess", "threading", "time"),
}
# What nothing may exceed, and what all that is not a test keeps to.
MAX_LINES = 500
GOOD_LINES = 400
GOOD_FUNCTION_LINES = 50


def sources(folder: str) -> list[Path]:
    """Python files that people write under `folder`, as paths from the root."""
    generated = ROOT / "outlast" / "v1"
    found = sorted((ROOT / folder).rglob("*.py"))
    return [path.relative_to(ROOT) for path in found if generated not in path.parents]


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names of everything that a file imports, inside functions too."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield node.module or ""


def import_graph() -> dict[str, set[str]]:
    """Of each of our modules, those of ours that it imports anywhere in it."""
    files = {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): path
        for package in (*PACKAGES, "deploy")
        for path in sources(package)
    }
    graph = {}
    for module, path in files.items():
        found = set(imported_modules(path))
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        # A package's `__init__` gathers what its own modules have.
        graph[module] = {
            each
            for each in found
            if each in files and each != module and not module.startswith(f"{each}.")
        }
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches all others of its group."""
    reached: dict[str, set[str]] = {}
    for module in graph:
        seen: set[str] = set()
        open_ends = [module]
        while open_ends:
            for each in graph[open_ends.pop()] - seen:
                seen.add(each)
                open_ends.append(each)
        reached[module] = seen
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in graph
        if module in reached[module]
    }
    return [list(group) for group in sorted(groups)]


def is_allowed_in_core(module: str, core: str) -> bool:
    """Whether a file under `core` may import `module`."""
    top, _, rest = module.partition(".")
    if top == "outlast":
        return rest.partition(".")[0] in CORE_VOCABULARY
    own = core.replace("/", ".")
    if module == own or module.startswith(f"{own}."):
        return True
    # Read by type checkers only; there is no such module when the code runs.
    if module == "_typeshed":
        return True
    return top in sys.stdlib_module_names and top not in FORBIDDEN_IN_CORES


def test_stubs_are_generated_from_the_protos_as_they_are(tmp_path: Path) -> None:
    protostubs.generate(tmp_path)
    fresh = tmp_path / "outlast" / "v1"
    committed = ROOT / "outlast" / "v1"
    names = {path.name for path in fresh.iterdir()}
    assert names == {path.name for path in committed.glob("*_pb2*.py*")}, "run `make proto`"
    stale = [
        name
        for name in sorted(names)
        if (fresh / name).read_bytes() != (committed / name).read_bytes()
    ]
    assert not stale, f"run `make proto`: {stale}"


def test_command_line_starts_without_heavy_imports() -> None:
    # What makes `outlast --help` answer at once; timing it would only test the machine.
    script = "import outlast.cli.main, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = {module.partition(".")[0] for module in done.stdout.split()}
    assert not loaded & {"torch", "grpc", "pydantic", "numpy", "sqlalchemy"}


def is_allowed_at_edge(path: Path, module: str) -> bool:
    """Whether a file of the controller's edge may import what other cores may not.

    Messages of agents are plain data, and what they say of ranks is analysed by another core.
    """
    is_edge = path.is_relative_to(ROOT / "controller/core/edge")
    return is_edge and (module == "outlast.v1" or module.startswith("diagnostics.core."))


@pytest.mark.parametrize("core", CORES)
def test_core_imports_nothing_but_the_standard_library_and_vocabulary(core: str) -> None:
    wrong = [
        f"{path}: {module}"
        for path in sources(core)
        for module in imported_modules(path)
        if not is_allowed_in_core(module, core) and not is_allowed_at_edge(ROOT / path, module)
    ]
    assert not wrong


@pytest.mark.parametrize("folder", [*PACKAGES, "bench", "deploy", "docs", "tests"])
def test_files_are_short_enough_to_read(folder: str) -> None:
    long = {
        str(path): lines
        for path in sources(folder)
        if (lines := len((ROOT / path).read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"more than {MAX_LINES} lines"


def long_parts(path: Path) -> Iterator[str]:
    """The file and those functions of it that are longer than they should be."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if len(text.splitlines()) > GOOD_LINES:
        yield str(path)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > GOOD_FUNCTION_LINES:
                yield f"{path}:{node.name}"


@pytest.mark.parametrize("folder", [*PACKAGES, "bench", "deploy"])
def test_files_and_functions_of_ours_are_short(folder: str) -> None:
    long = [part for path in sources(folder) for part in long_parts(path)]
    limits = f"a file has at most {GOOD_LINES} lines, a function {GOOD_FUNCTION_LINES}"
    assert sorted(long) == [], f"too long: {limits}"


def test_every_module_of_outlast_has_its_layer() -> None:
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    layers = contracts["importlinter:contract:layers"]["layers"]
    named = set(re.findall(r"outlast\.(\w+)", layers))
    here = {path.stem for path in (ROOT / "outlast").glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in (ROOT / "outlast").glob("*/__init__.py")}
    assert here | packages <= named, "add it to the layers in .importlinter"


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[<>=!~\[; ]", requirement)[0].lower() for requirement in wanted}
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    explained = {name.lower() for name in re.findall(r"^\| ([\w-]+) \|", text, re.MULTILINE)}
    assert names == explained - {"library"}


def test_every_dependency_has_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    names = {re.split(r"[<>=!~\[; ]", requirement)[0].lower() for requirement in wanted}
    assert not {name for name in names if f"\n{name}==" not in f"\n{pinned}"}


def test_kubernetes_client_is_no_older_than_the_tested_one() -> None:
    """It changes its own insides from one major version to the next, and the adapter uses them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    major = pins["kubernetes"].partition(".")[0]
    extras = project["optional-dependencies"]
    for wanted in (extras["kubernetes"], extras["dev"]):
        assert f"kubernetes>={major}" in wanted


def test_ci_runs_what_a_person_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text(encoding="utf-8").splitlines()
    assert "set -euo pipefail" in lines
    everything = (
        "test test-crash test-kube test-prometheus test-postgres test-stores test-web chaos"
    )
    assert [line for line in lines if "make" in line] == [
        "make --jobs 2 .venv/.installed kube-server </dev/null",
        f"exec make {everything} CHAOS='--brief --healthy-s 120' </dev/null",
    ]


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Two files that need each other are one thing cut in two at the wrong place."""
    found = circles(import_graph())
    # The parts of a simulated world name its type.
    assert [group for group in found if "controller.sim.world" not in group] == []


def test_circles_of_imports_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"d"}, "f": set[str]()}
    assert circles(graph) == [["b", "c"], ["d", "e"]]


def test_no_conflict_of_a_merge_is_left() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    marks = (b"\n<<<<<<< ", b"\n>>>>>>> ")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            assert not any(mark in path.read_bytes() for mark in marks), name
