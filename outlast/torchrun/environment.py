"""The environment of a rank as torchrun sets it, so that any script finds what it expects.

Ranks of one node stand together: node 0 has the first ones. All nodes have as many, and all ranks
one role, as `torchrun` on the command line has it too; so a rank's role rank is its rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

# What torchrun takes from its own environment, where it is set there.
_THREADS = "OMP_NUM_THREADS"
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOfRun:
    """One start of all ranks: how many there are, and where they meet."""

    run_id: str
    num_nodes: int
    workers_per_node: int
    master_addr: str
    master_port: int
    restart_count: int = 0
    max_restarts: int = 0
    role: str = "default"
    has_agent_store: bool = True
    """A store listens at the master address already; rank 0 need not host one."""
    virtual_local_rank: bool = False
    """Each rank sees its own GPU only, as its first."""

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.workers_per_node


def rank_environment(
    run: RanksOfRun,
    *,
    node_index: int,
    local_rank: int,
    error_file: str,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """What is set for a rank over the variables that it inherits; `error_file` may be empty.

    Raises:
        ValueError: with virtual local ranks, CUDA_VISIBLE_DEVICES has fewer GPUs than ranks.
    """
    rank = node_index * run.workers_per_node + local_rank
    world_size = str(run.world_size)
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(node_index),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": run.role,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(run.workers_per_node),
        "GROUP_WORLD_SIZE": str(run.num_nodes),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": run.master_addr,
        "MASTER_PORT": str(run.master_port),
        "TORCHELASTIC_RUN_ID": run.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(run.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(run.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(run.has_agent_store),
        "TORCHELASTIC_ERROR_FILE": error_file,
        _ASYNC_ERRORS: inherited.get(_ASYNC_ERRORS, "1"),
    }
    # Ranks that share a machine would otherwise each start a thread for every CPU.
    if _THREADS not in inherited and run.workers_per_node > 1:
        environment[_THREADS] = "1"
    if run.virtual_local_rank:
        environment["LOCAL_RANK"] = "0"
        environment[_VISIBLE_DEVICES] = _own_gpu(local_rank, inherited.get(_VISIBLE_DEVICES))
    return environment


def rank_arguments(arguments: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """Arguments of a script as a rank gets them: `${local_rank}` is replaced."""
    return tuple(Template(each).safe_substitute(local_rank=local_rank) for each in arguments)


def _own_gpu(local_rank: int, visible: str | None) -> str:
    if visible is None:
        return str(local_rank)
    gpus = visible.split(",")
    if local_rank >= len(gpus):
        raise ValueError(
            f"{_VISIBLE_DEVICES} is {visible!r}, {len(gpus)} GPUs, and local rank {local_rank} "
            "needs its own; start fewer ranks on a node"
        )
    return gpus[local_rank].strip()
