"""The command line of `outlast run` is read as torchrun reads its own."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.api import to_map
from torch.distributed.run import get_args_parser

from outlast.torchrun.flags import RunOptions, Streams, run_options
from outlast.torchrun.parser import FlagError, HelpWantedError, flag_parser


def theirs(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, object] | None:
    """What torchrun's own parser makes of a command line; None where it refuses."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    with (
        mock.patch.dict(os.environ, {**kept, **environ}, clear=True),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            return vars(get_args_parser().parse_args(list(argv)))
        except (SystemExit, ValueError):
            return None


def ours(argv: Sequence[str], environ: Mapping[str, str]) -> dict[str, object] | None:
    try:
        return vars(flag_parser(environ, "outlast run").parse_args(list(argv)))
    except FlagError:
        return None


CASES: tuple[tuple[str, dict[str, str]], ...] = (
    ("train.py", {}),
    ("--standalone --nproc-per-node=2 train.py --lr 1e-3 --nnodes 4", {}),
    ("--nnodes=1:4 --nproc_per_node gpu --max-restarts 3 train.py", {}),
    ("--nnodes 2 --node_rank 1 --master-addr host --master_port 29501 train.py", {}),
    ("--rdzv-backend c10d --rdzv_endpoint=host:29400 --rdzv-id 7 --rdzv_conf a=1 train.py", {}),
    ("-m my.package --flag", {}),
    ("--module my.package", {}),
    ("--no-python ./run.sh -m", {}),
    ("--run_path /a/b.py", {}),
    ("--log-dir logs -r 3 -t 0:1,1:2 --local-ranks-filter 0,1 train.py", {}),
    ("--redirects=1 --tee=2 train.py", {}),
    ("--duplicate-stdout-filters a,b,,c train.py", {}),
    ("--monitor-interval 5 --start-method fork --event-log-handler x --role r train.py", {}),
    ("--local-addr 10.0.0.1 --numa-binding socket --logs-specs mine train.py", {}),
    ("--signals-to-handle SIGTERM --shutdown-timeout 5 --virtual-local-rank train.py", {}),
    # Beginnings of flags.
    ("--nnode 2 --stand train.py", {}),
    ("--node 2 train.py", {}),
    ("-- train.py --standalone", {}),
    ("train.py -- --standalone", {}),
    # Refused.
    ("", {}),
    ("--unknown train.py", {}),
    ("--nnodes", {}),
    ("--max-restarts many train.py", {}),
    ("--start-method other train.py", {}),
    ("--numa-binding other train.py", {}),
    # Variables.
    ("train.py", {"PET_NNODES": "2:3", "PET_NPROC_PER_NODE": "4", "PET_STANDALONE": "1"}),
    ("--nnodes 5 train.py", {"PET_NNODES": "2:3"}),
    ("train.py", {"PET_STANDALONE": "0", "PET_MODULE": "7", "PET_MAX_RESTARTS": "2"}),
    ("train.py", {"PET_STANDALONE": "yes"}),
    ("train.py", {"PET_MAX_RESTARTS": "many"}),
    ("train.py", {"PET_START_METHOD": "other"}),
    ("train.py", {"PET_LOGS_SPECS": "mine", "PET_NUMA_BINDING": "node"}),
    ("train.py", {"PET_DUPLICATE_STDOUT_FILTERS": "a,b", "PET_MASTER_PORT": "1"}),
)


@pytest.mark.parametrize(("line", "environ"), CASES)
def test_a_command_line_means_what_it_means_to_torchrun(line: str, environ: dict[str, str]) -> None:
    assert ours(line.split(), environ) == theirs(line.split(), environ)


def test_every_flag_of_torchrun_is_known_with_all_its_spellings() -> None:
    def spellings(parser: object) -> dict[str, set[str]]:
        return {each.dest: set(each.option_strings) for each in parser._actions}

    assert spellings(flag_parser({}, "outlast run")) == spellings(get_args_parser())


_FLAGS = [
    spelling
    for action in get_args_parser()._actions
    for spelling in action.option_strings
    if action.dest != "help"
]
_WORDS = st.sampled_from(["1", "0", "2:3", "x", "gpu", "0:1,1:3", "fork", "node", "", "-1", "--"])
_VARIABLES = st.sampled_from([f"PET_{each.dest.upper()}" for each in get_args_parser()._actions])


@given(
    st.lists(st.one_of(st.sampled_from(_FLAGS), _WORDS), max_size=8),
    st.dictionaries(_VARIABLES, st.sampled_from(["0", "1", "x", ""]), max_size=3),
)
def test_any_command_line_means_what_it_means_to_torchrun(
    argv: list[str], environ: dict[str, str]
) -> None:
    assert ours(argv, environ) == theirs(argv, environ)


def options(line: str, **environ: str) -> RunOptions:
    return run_options(line.split(), environ)


def test_options_say_what_to_run() -> None:
    found = options(
        "--nnodes 2:4 --nproc-per-node 8 --max-restarts 3 --rdzv-id run-7 --role trainer "
        "--shutdown-timeout 9 --local-ranks-filter 1,0,1 -m my.package --lr 1"
    )
    assert (found.min_nodes, found.max_nodes, found.workers_per_node) == (2, 4, 8)
    assert (found.script, found.script_args, found.is_module) == ("my.package", ("--lr", "1"), True)
    assert (found.max_restarts, found.run_id, found.role) == (3, "run-7", "trainer")
    assert (found.stop_grace_s, found.shown_local_ranks) == (9, (0, 1))
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("line", "run_id"),
    [
        ("train.py", None),
        ("--rdzv-id=a train.py", None),
        ("--rdzv-id=a --master-port 1 train.py", "a"),
        ("--rdzv-id=a --rdzv-backend c10d train.py", "a"),
        ("--rdzv-id=a --nnodes 2 train.py", "a"),
        ("--rdzv-id=a --nnodes 2 --standalone train.py", None),
    ],
)
def test_a_run_id_is_made_up_where_torchrun_makes_it_up(line: str, run_id: str | None) -> None:
    assert options(line).run_id == run_id


def test_flags_without_an_effect_are_named_once_each_with_the_reason() -> None:
    found = options(
        "--rdzv-backend c10d --rdzv-endpoint host:1 --node-rank 1 --numa-binding node "
        "--virtual-local-rank train.py",
        PET_MONITOR_INTERVAL="5",
    )
    first_words = [line.partition(" has no effect")[0] for line in found.warnings]
    assert first_words == [
        "--rdzv-endpoint host:1",
        "--node-rank 1",
        "--monitor-interval 5.0",
        "--virtual-local-rank",
        "--numa-binding node",
    ]
    assert all(line.partition(": ")[2] for line in found.warnings)


@pytest.mark.parametrize("line", ["--help", "-h train.py", "--nnodes 2 --help"])
def test_help_is_asked_for_before_the_script_only(line: str) -> None:
    with pytest.raises(HelpWantedError):
        options(line)
    assert options("train.py --help").script_args == ("--help",)


@pytest.mark.parametrize("text", ["0", "3", "0:1,1:3", "2:2"])
def test_streams_are_those_that_torchrun_redirects(text: str) -> None:
    found = options(f"--tee {text} train.py").tee
    expected = to_map(Std.from_str(text), 4)
    assert {rank: int(found.of(rank)) for rank in range(4)} == {
        rank: int(value) for rank, value in expected.items()
    }
    assert found.of(0) in Streams


REFUSED = (
    ("--nnodes 3:2 train.py", "--nnodes is '3:2'; allowed: 0 < MIN <= MAX"),
    ("--nnodes x train.py", "allowed: N or MIN:MAX"),
    ("--nproc-per-node tpu train.py", "allowed: a number, or one of auto, cpu, gpu, xpu"),
    ("--nproc-per-node 0 train.py", "allowed: 1 or more"),
    ("--max-restarts -1 train.py", "allowed: 0 or more"),
    ("--nodes 0 train.py", "--nodes is 0; allowed: 1 or more"),
    ("--nodes 2 --nnodes 3 train.py", "--nodes is 2, and --nnodes 3 needs 3 of them"),
    ("--server h:1 --nodes 2 --nnodes 2 train.py", "mean the same with --server"),
    ("--no-python -m train.py", "--no-python and --module exclude each other"),
    ("--run-path -m train.py", "--run-path and --module exclude each other"),
    ("--tee 4 train.py", "--tee is '4'"),
    ("--local-ranks-filter a train.py", "--local-ranks-filter is 'a'"),
    ("--shutdown-timeout -1 train.py", "--shutdown-timeout is -1"),
    ("--unknown train.py", "unrecognized arguments"),
    ("", "the following arguments are required: SCRIPT"),
)


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_what_cannot_run_is_refused_with_the_usage(line: str, message: str) -> None:
    with pytest.raises(FlagError) as caught:
        options(line)
    assert str(caught.value).startswith("usage: outlast run")
    assert message in str(caught.value)
