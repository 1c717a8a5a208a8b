"""One script under torchrun and under `outlast run`: all that it finds, and how both end.

Differences are allowed by a table with reasons, which the documentation has, too.
"""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outlast.ports import free_port
from tests.torchrun.conformance.allowed import DIFFERENCES, allowed
from tests.torchrun.conformance.launchers import (
    OUTLAST,
    TORCHRUN,
    Case,
    Outcome,
    differences,
    run,
)

# A case takes 10 s on two idle cores, and many times that beside other tests.
pytestmark = pytest.mark.timeout(600)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "scripts.md"


def _two_nodes() -> Case:
    # The launcher of each node is told where all of them meet.
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}")
    return Case(
        flags=("--rdzv-id", "two", "--max-restarts", "2"),
        arguments=("--meet",),
        torchrun=(("--nnodes", "2", *meeting),) * 2,
        outlast=("--nodes", "2"),
    )


CASES = {
    "restart": Case(
        flags=("--nproc-per-node", "2", "--max-restarts", "1"),
        arguments=("--meet", "1:0=exit-3"),
    ),
    "exit": Case(
        flags=("--max-restarts", "0", "--role", "trainer"),
        arguments=("0:0=exit-3", "two words", "--device=${local_rank}"),
        environment=(("OMP_NUM_THREADS", "2"), ("CUDA_VISIBLE_DEVICES", "5,7")),
    ),
    "raise": Case(flags=("--max-restarts", "0"), arguments=("0:0=raise",)),
    "module": Case(
        flags=("--max-restarts", "0", "-m"), script=("probe",), arguments=("0:0=record",)
    ),
    "program": Case(
        flags=("--max-restarts", "0", "--no-python"),
        script=(sys.executable, "probe.py"),
        arguments=("0:0=signal-SIGKILL",),
    ),
    "nodes": _two_nodes(),
    "stop": Case(
        flags=("--nproc-per-node", "2"),
        arguments=("0:0=stop", "1:0=stop"),
        ranks=2,
        stopped_by=signal.SIGINT,
    ),
}
# Of torchrun and of `outlast run`.
CODES = {
    "restart": (0, 0),
    "exit": (1, 3),
    "raise": (1, 1),
    "module": (1, 1),
    "program": (1, 128 + signal.SIGKILL),
    "nodes": (0, 0),
    "stop": (1, 128 + signal.SIGINT),
}


class Outcomes:
    """Each case is run when it is asked for first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[Outcome, Outcome]] = {}

    def of(self, name: str) -> tuple[Outcome, Outcome]:
        """Under torchrun, and under `outlast run`."""
        if name not in self._known:
            # The port of two nodes is chosen just before: it would be another's by now.
            folder, case = self._folder / name, _two_nodes() if name == "nodes" else CASES[name]
            with ThreadPoolExecutor() as both:
                theirs = both.submit(run, case, folder / "torchrun", TORCHRUN)
                ours = both.submit(run, case, folder / "outlast", OUTLAST)
                self._known[name] = theirs.result(), ours.result()
        return self._known[name]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("conformance"))


@pytest.mark.parametrize("name", CASES)
def test_a_script_finds_the_same_but_for_what_the_table_says(outcomes: Outcomes, name: str) -> None:
    theirs, ours = outcomes.of(name)
    assert theirs.found, theirs.output
    assert sorted(ours.found) == sorted(theirs.found), ours.output
    found = list(differences(theirs, ours))
    assert [each for each in found if each[0] not in allowed(name)] == []
    assert (theirs.code, ours.code) == CODES[name], ours.output


def test_the_table_has_no_difference_that_is_none(outcomes: Outcomes) -> None:
    for name in CASES:
        seen = {each[0] for each in differences(*outcomes.of(name))}
        assert allowed(name) - seen == set(), name


def test_only_keys_of_its_own_attempt_are_in_the_store_of_a_rank(outcomes: Outcomes) -> None:
    theirs, ours = outcomes.of("restart")
    seen = {
        rank: facts["group"]["keys of an earlier attempt"] for rank, facts in ours.found.items()
    }
    assert seen == {"0-0": False, "0-1": False, "1-0": False, "1-1": False}
    assert theirs.found["1-0"]["group"]["keys of an earlier attempt"], "torchrun's own store is new"
    counts = [facts["environment"]["TORCHELASTIC_RESTART_COUNT"] for facts in ours.found.values()]
    assert counts == ["0", "0", "1", "1"]


def test_an_exception_is_in_the_error_file_where_torch_records_it(outcomes: Outcomes) -> None:
    theirs, ours = outcomes.of("module")
    assert ours.errors == theirs.errors
    message = ours.errors["0-0"]["message"]
    assert message["message"] == "ValueError: loss is not finite"
    assert 'probe.py", line' in message["extraInfo"]["py_callstack"]
    assert not outcomes.of("raise")[1].errors


def test_ranks_of_two_nodes_know_each_other(outcomes: Outcomes) -> None:
    _, ours = outcomes.of("nodes")
    for rank in range(2):
        facts = ours.found[f"0-{rank}"]
        environment = facts["environment"]
        assert (environment["GROUP_RANK"], environment["LOCAL_RANK"]) == (str(rank), "0")
        assert facts["group"]["sum"] == [1, 2]


def test_ranks_are_asked_to_stop(outcomes: Outcomes) -> None:
    theirs, ours = outcomes.of("stop")
    assert theirs.stopped_by == ("SIGINT", "SIGINT")
    assert ours.stopped_by == ("SIGTERM", "SIGTERM")


def test_the_page_has_the_table() -> None:
    _, _, below = PAGE.read_text(encoding="utf-8").partition("## Differences from torchrun\n")
    rows = [line for line in below.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert rows == [
        "| what | torchrun | `outlast run` | why |",
        *(each.row for each in DIFFERENCES),
    ]
