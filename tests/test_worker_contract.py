"""What an agent gives a worker reaches it whole, and no other file knows how."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.chosen import ChosenStart
from outlast.script_contract import ScriptContract
from outlast.skipped import StepRange
from outlast.worker_contract import (
    ContractError,
    WorkerContract,
    WorkerExitCode,
    key_of,
    log_rank,
    parse_rank_name,
    rank_name,
)
from tests.contracts import contract_of

ROOT = Path(__file__).resolve().parent.parent
OWNER = Path("outlast/worker_contract.py")
KEYS = {key_of(each.name) for each in fields(WorkerContract)}
# Names of files and variables of the contract, as a string literal would have them.
LITERALS = re.compile(
    r"rank-(\*|\d{5}|\()|\.blackbox$|\.error\.json$|\.environment\.json$|^nccl-"
    r"|^OUTLAST_WORKER$|^GLOO_SOCKET_IFNAME$"
)

_NUMBERS = st.integers(min_value=-(2**63), max_value=2**63)
# Surrogates are no text: neither a URL nor a path of a spec can hold one.
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
_PATHS = st.lists(_TEXTS.filter(bool), min_size=1).map(lambda parts: Path("/", *parts))

_SCRIPTS = st.builds(
    ScriptContract,
    command=st.lists(_TEXTS).map(tuple),
    python=st.lists(_TEXTS).map(tuple),
    note=_TEXTS,
    environment=st.dictionaries(_TEXTS, _TEXTS),
    cwd=_TEXTS,
    stop_signal=_NUMBERS,
)


@st.composite
def contracts(draw: st.DrawFn) -> WorkerContract:
    world_size = draw(st.integers(min_value=1, max_value=9))
    return contract_of(
        draw(_PATHS),
        draw(st.integers(min_value=0, max_value=world_size - 1)),
        world_size=world_size,
        attempt=draw(st.integers(min_value=1, max_value=2**40)),
        local_rank=draw(_NUMBERS),
        job_id=draw(_TEXTS),
        rank_nodes=tuple(draw(st.lists(_TEXTS, min_size=world_size, max_size=world_size))),
        spec_json=draw(_TEXTS),
        rendezvous_host=draw(_TEXTS),
        rendezvous_port=draw(_NUMBERS),
        rendezvous_fd=draw(st.none() | _NUMBERS),
        data_dir=draw(_PATHS),
        data_socket=draw(st.none() | _PATHS),
        committed_step=draw(_NUMBERS),
        skipped=tuple(draw(st.lists(st.builds(StepRange, first=_NUMBERS, last=_NUMBERS)))),
        replayed_step=draw(_NUMBERS),
        suspects=tuple(draw(st.lists(_TEXTS))),
        chosen=tuple(
            draw(
                st.lists(
                    st.builds(
                        ChosenStart, step=_NUMBERS, attempt=_NUMBERS, url=_TEXTS, url_step=_NUMBERS
                    )
                )
            )
        ),
        checkpoint_url=draw(_TEXTS),
        forked_at_ns=draw(_NUMBERS),
        device=draw(_TEXTS),
        script=draw(st.none() | _SCRIPTS),
    )


@given(contracts())
def test_worker_reads_what_its_agent_wrote(contract: WorkerContract) -> None:
    env = contract.to_env()
    assert set(env) == KEYS
    assert WorkerContract.from_env({**env, "PATH": "/bin"}) == contract


@pytest.mark.parametrize("key", sorted(KEYS))
def test_missing_value_is_named(key: str) -> None:
    env = contract_of(Path("/job")).to_env()
    del env[key]
    with pytest.raises(ContractError, match=rf"^{key} is missing"):
        WorkerContract.from_env(env)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("OUTLAST_ATTEMPT", "3x", "'3x'; it must be a whole number"),
        ("OUTLAST_ATTEMPT", "0", "0; it must be 1 or more"),
        ("OUTLAST_RANK", "2", r"2; it must be in 0\.\.1"),
        ("OUTLAST_WORLD_SIZE", "0", "0; it must be 1 or more"),
        ("OUTLAST_RENDEZVOUS_FD", "-", "'-'; it must be a whole number"),
        ("OUTLAST_ERROR_PATH", "", "''; it must be a path"),
        ("OUTLAST_RANK_NODES", '["a"]', "1 names long; it must name the node of each of 2 ranks"),
        ("OUTLAST_RANK_NODES", "{}", "it must be a JSON list"),
        ("OUTLAST_SUSPECTS", "[1]", "1 is no string"),
        ("OUTLAST_SKIPPED", "[", "it must be a JSON list"),
        ("OUTLAST_SKIPPED", '[{"first": 1}]', "is no range of steps"),
        ("OUTLAST_CHOSEN", '[{"step": "4"}]', "is no chosen start"),
    ],
)
def test_wrong_value_is_named(key: str, value: str, expected: str) -> None:
    env = contract_of(Path("/job")).to_env() | {key: value}
    with pytest.raises(ContractError, match=rf"^{key} is .*{expected}"):
        WorkerContract.from_env(env)


@given(st.integers(min_value=0, max_value=10**7))
def test_names_of_ranks_are_read_back(rank: int) -> None:
    assert parse_rank_name(rank_name(rank)) == rank
    assert log_rank(f"{rank_name(rank)}.log") == rank


@pytest.mark.parametrize("name", ["rank-1", "rank-00001.log", "a1", "rank-0000x", ""])
def test_other_names_are_of_no_rank(name: str) -> None:
    assert parse_rank_name(name) is None


@pytest.mark.parametrize("name", ["rank-00001.blackbox", "standby.log", "rank-00001", "rank-1.log"])
def test_other_files_are_no_log_of_a_rank(name: str) -> None:
    assert log_rank(name) is None


def test_contract_is_read_without_heavy_imports() -> None:
    script = "import outlast.worker_contract, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = {module.partition(".")[0] for module in done.stdout.split()}
    assert not loaded & {"torch", "grpc", "pydantic", "numpy", "google", "yaml"}


def _literals(path: Path) -> Iterator[tuple[int, object]]:
    """Line and value of every literal of a file, docstrings left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # A docstring, which is for people.
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in texts:
            yield node.lineno, node.value


def _repeats(value: object) -> bool:
    """Whether a literal is of the contract."""
    if isinstance(value, str):
        return value in KEYS or bool(LITERALS.search(value)) or value == "rank-"
    return type(value) is int and value == WorkerExitCode.STOPPED


@pytest.mark.parametrize("value", [75, "rank-*.log", "rank-", "OUTLAST_RANK", "nccl-{rank}.pipe"])
def test_literals_of_the_contract_are_recognised(value: object) -> None:
    assert _repeats(value)


def test_no_other_file_repeats_the_contract() -> None:
    packages = ("outlast", "controller", "trainer", "checkpoint", "diagnostics", "demo")
    files = [
        path.relative_to(ROOT) for package in packages for path in (ROOT / package).rglob("*.py")
    ]
    found = [
        f"{path}:{line}: {value!r}"
        for path in sorted(files)
        if path != OWNER and "v1" not in path.parts
        for line, value in _literals(ROOT / path)
        if _repeats(value)
    ]
    assert not found, "use the names of outlast.worker_contract"
