"""The part of a job's spec that says what runs: the built-in trainer, or a command of the user's.

What only makes sense together with other fields is in `outlast.rules.workload`; how many nodes a
command runs on is filled in by `outlast.spec.parse`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outlast.section import Section


class WorkloadSpec(Section):
    """A script of your own, in place of the built-in trainer, started as torchrun starts it."""

    command: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="What each rank runs, such as [python, train.py, --lr, '1e-3']; the trainer "
        "unless given. A relative path of the script is below the submitter's folder, and the file "
        "must be there; it stays as it is where working_dir is the full path of that folder. The "
        "sections of the trainer may not be given with it.",
    )
    env: dict[str, str] = Field(
        {}, description="Variables of ranks, over those of the agent and of torchrun."
    )
    working_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder that ranks run in, which every node must have; unless given, the "
        "attempt's folder on the node. A relative path is below the submitter's folder.",
    )
    python_path: tuple[str, ...] = Field(
        (),
        description="Folders that Python looks into first, on every node. Relative paths are below "
        "the submitter's folder.",
    )
    preload: tuple[str, ...] | Literal["off"] = Field(
        ("torch",),
        description="Modules that are imported once on a node, before its ranks are forked, in the "
        "order given; torch always is. One that starts threads, opens a socket or takes hold of a "
        "GPU as it is imported is left out, and the log of a rank says so. off: each rank is a "
        "process started afresh.",
    )
    python: str | None = Field(
        None,
        min_length=1,
        description="The interpreter of the script, on every node; that of the agent unless given. "
        "Nothing of Outlast need be installed in its environment.",
    )
    workers_per_node: int | None = Field(
        None, ge=1, description="Ranks on one node; 1 unless given."
    )
    min_nodes: int | None = Field(
        None,
        ge=1,
        description="Fewest nodes to go on with while others are missing; takes max_nodes. The "
        "world size changes, as with torchrun --nnodes MIN:MAX.",
    )
    max_nodes: int | None = Field(
        None, ge=1, description="Nodes that are wanted, in place of resources.nodes."
    )
    stop_signal: Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"] = Field(
        "SIGTERM", description="Asks a rank to stop."
    )
    stop_grace_s: float = Field(
        30.0, ge=0, description="A rank that has not stopped by then is killed."
    )
