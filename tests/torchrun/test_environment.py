"""The environment of a rank is what torchrun itself gives to a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.torchrun.environment import RanksOfRun, rank_arguments, rank_environment

SCRIPT = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / f"{os.environ['RANK']}.json").write_text(json.dumps([dict(os.environ), sys.argv[2:]]))
"""
# Set by Python, and by torchrun for itself: its processes learn so which signals to pass on.
_OF_OTHERS = {"LC_CTYPE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}


def under_torchrun(
    tmp_path: Path, *flags: str, **variables: str
) -> list[tuple[dict[str, str], list[str]]]:
    """The environment of each rank of a script on one node, and its arguments."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", *flags, str(script), str(out)]
    given = {**inherited(), **variables}
    subprocess.run([*command, "--rank=${local_rank}"], env=given, check=True, capture_output=True)
    found = sorted(out.iterdir())
    return [tuple(json.loads(each.read_text())) for each in found]


def inherited() -> dict[str, str]:
    # The tests' own limit of threads would hide what torchrun does about it.
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def compare(
    ranks: list[tuple[dict[str, str], list[str]]], run: RanksOfRun, given: dict[str, str]
) -> None:
    for local_rank, (environment, arguments) in enumerate(ranks):
        ours = rank_environment(
            run,
            node_index=0,
            local_rank=local_rank,
            error_file=environment["TORCHELASTIC_ERROR_FILE"],
            inherited=given,
        )
        theirs = {name: value for name, value in environment.items() if name not in _OF_OTHERS}
        assert {**given, **ours} == theirs
        assert rank_arguments(("--rank=${local_rank}",), local_rank) == tuple(arguments)


def test_two_ranks_of_one_machine_get_what_torchrun_gives_them(tmp_path: Path) -> None:
    ranks = under_torchrun(
        tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=3", "--role=trainer"
    )
    assert len(ranks) == 2
    first = ranks[0][0]
    run = RanksOfRun(
        # torchrun makes these up.
        run_id=first["TORCHELASTIC_RUN_ID"],
        master_addr=first["MASTER_ADDR"],
        master_port=int(first["MASTER_PORT"]),
        num_nodes=1,
        workers_per_node=2,
        max_restarts=3,
        role="trainer",
    )
    compare(ranks, run, inherited())
    assert first["OMP_NUM_THREADS"] == "1"


def test_variables_of_the_user_are_kept_and_one_rank_may_use_all_threads(tmp_path: Path) -> None:
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "CUDA_VISIBLE_DEVICES": "5,7"}
    flags = ("--nnodes=1", "--master-port=29517", "--rdzv-id=run-7", "--virtual-local-rank")
    ranks = under_torchrun(tmp_path, *flags, **variables)
    run = RanksOfRun(
        run_id="run-7",
        master_addr="127.0.0.1",
        master_port=29517,
        num_nodes=1,
        workers_per_node=1,
        virtual_local_rank=True,
    )
    compare(ranks, run, {**inherited(), **variables})
    assert "OMP_NUM_THREADS" not in ranks[0][0]
    assert ranks[0][0]["CUDA_VISIBLE_DEVICES"] == "5"


def test_ranks_of_later_nodes_follow_those_of_earlier_ones() -> None:
    run = RanksOfRun(
        run_id="run",
        num_nodes=3,
        workers_per_node=4,
        master_addr="10.0.0.1",
        master_port=29500,
        restart_count=2,
        max_restarts=5,
        has_agent_store=False,
    )
    found = rank_environment(run, node_index=2, local_rank=1, error_file="", inherited={})
    assert found == {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "2",
        "ROLE_RANK": "9",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "12",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_a_rank_without_a_gpu_of_its_own_is_refused() -> None:
    run = RanksOfRun(
        run_id="run",
        num_nodes=1,
        workers_per_node=2,
        master_addr="127.0.0.1",
        master_port=29500,
        virtual_local_rank=True,
    )
    given = {"CUDA_VISIBLE_DEVICES": "3"}
    with pytest.raises(ValueError, match="local rank 1 needs its own"):
        rank_environment(run, node_index=0, local_rank=1, error_file="", inherited=given)
    alone = rank_environment(run, node_index=0, local_rank=1, error_file="", inherited={})
    assert (alone["LOCAL_RANK"], alone["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
