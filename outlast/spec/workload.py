"""The part of a job's spec that says what runs, and on what nodes.

It is the built-in trainer, or a command of the user's. What only makes sense together with other
fields is in `outlast.rules.workload`; how many nodes a command runs on is filled in by
`outlast.spec.parse`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outlast.ids import IMAGE_PATTERN
from outlast.section import Section
from outlast.worker_contract import BLACK_BOX_RECORDS, MOST_BLACK_BOX_RECORDS


class CodeSpec(Section):
    """A folder that is sent along with the job, and unpacked on each of its nodes."""

    path: str | None = Field(
        None,
        min_length=1,
        description="Folder of the code, on the submitter's side: a relative path is below the "
        "submitter's folder. On nodes ranks run in a copy of it, and relative paths of command, "
        "working_dir and python_path are inside of that. What .gitignore names is left out.",
    )
    exclude: tuple[str, ...] = Field(
        (), description="What else is left out, in patterns as in .gitignore."
    )
    digest: str | None = Field(
        None,
        description="Which code that is, filled in by `outlast submit`; the job runs it in every "
        "attempt. Where it is given, path is not read, and the controller must have the code.",
    )

    @property
    def is_given(self) -> bool:
        """Whether the job brings code."""
        return self.path is not None or self.digest is not None


class VariableSpec(Section):
    """Where nodes find the value of a variable that is no affair of the controller, a secret."""

    from_env: str | None = Field(None, min_length=1)
    from_file: str | None = Field(None, min_length=1)


class ResourcesSpec(Section):
    """Nodes the job runs on."""

    nodes: int | None = Field(
        None,
        ge=1,
        description="World size / workers_per_node unless given. Given without parallel.dp, it "
        "decides how many replicas there are.",
    )
    workers_per_node: int | None = Field(
        None, ge=1, description="Ranks on one node; the largest divisor of the world size up to 8."
    )
    standby: int = Field(0, ge=0, description="Checked spare nodes to hold ready.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto takes CUDA where every worker of a node can have its own GPU."
    )
    black_box_records: int = Field(
        BLACK_BOX_RECORDS,
        ge=256,
        le=MOST_BLACK_BOX_RECORDS,
        description="Operations, and as many passes and phases, that each rank keeps for traces "
        "and timelines: 104 bytes of the node's disk for each.",
    )


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
    code: CodeSpec = CodeSpec()
    env: dict[str, str | VariableSpec] = Field(
        {},
        description="Variables of ranks, over those of the agent and of torchrun. For a secret: "
        "{from_env: NAME}, a variable of the agent on each node, or {from_file: /path}, a file "
        "there, whose last newline is left out; the value is read when ranks start, and kept "
        "nowhere.",
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
        "order given; torch always is, with what its optimizers import (torch._dynamo). One that "
        "starts threads, opens a socket or takes hold of a GPU as it is imported is left out, and "
        "the log of a rank says so. off: each rank is a process started afresh.",
    )
    python: str | None = Field(
        None,
        min_length=1,
        description="The interpreter of the script, on every node; unless given, that of "
        "the agent, or of the image by the name that command has. A relative path is below the "
        "submitter's folder. Nothing of Outlast need be installed in its environment.",
    )
    image: str | None = Field(
        None,
        pattern=f"^{IMAGE_PATTERN.pattern}$",
        description="The container image that ranks run in, on Kubernetes; that of the agents "
        "unless given. It must have Python with torch, and nothing of Outlast. Full paths in the "
        "spec are inside of it.",
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

    @property
    def interpreter(self) -> str:
        """The interpreter of the script where it is another than the agent's, else ""."""
        if self.python is not None:
            return self.python
        # The agent's is not of the image.
        return self.command[0] if self.image is not None and self.command else ""

    @property
    def known_env(self) -> dict[str, str]:
        """The variables whose values are known: on a node that has looked, all of them."""
        return {name: value for name, value in self.env.items() if isinstance(value, str)}
