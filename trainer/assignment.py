"""What the agent tells a worker, once, when it is forked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.chosen import ChosenStart
from outlast.skipped import StepRange
from outlast.spec import JobSpec
from outlast.spec.parse import accepted_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One rank's part in one attempt of a job."""

    job_id: str
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    rank_nodes: tuple[str, ...]
    spec: JobSpec
    rendezvous_host: str
    rendezvous_port: int
    rendezvous_fd: int | None
    """The agent's listening socket, on rank 0 only."""
    blackbox_path: Path
    error_path: Path
    environment_path: Path
    """Where the rank writes what decides the bits of its arithmetic, for its agent."""
    memory_dir: Path
    data_dir: Path
    committed_step: int
    """The newest step that the controller knows to be in storage; 0 or less for none."""
    skipped: tuple[StepRange, ...]
    """Steps whose batch is left out."""
    replayed_step: int
    """A step that gave no number and is done again; 0 for none."""
    suspects: tuple[str, ...]
    """Nodes that had a part in it then."""
    chosen: tuple[ChosenStart, ...]
    """Where persons let the job go on, oldest first."""
    checkpoint_url: str
    forked_at_ns: int
    device: str

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this one's node."""
        own = self.rank_nodes[self.rank]
        return tuple(rank for rank, node in enumerate(self.rank_nodes) if node == own)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Assignment:
        """Raises KeyError for a field that is missing and SpecError for a bad spec."""
        descriptor = fields["rendezvous_fd"]
        return cls(
            job_id=str(fields["job_id"]),
            attempt=int(fields["attempt"]),
            rank=int(fields["rank"]),
            world_size=int(fields["world_size"]),
            local_rank=int(fields["local_rank"]),
            rank_nodes=tuple(fields["rank_nodes"]),
            spec=accepted_spec(dict(fields["spec"])),
            rendezvous_host=str(fields["rendezvous_host"]),
            rendezvous_port=int(fields["rendezvous_port"]),
            rendezvous_fd=None if descriptor is None else int(descriptor),
            blackbox_path=Path(fields["blackbox_path"]),
            error_path=Path(fields["error_path"]),
            environment_path=Path(fields["environment_path"]),
            memory_dir=Path(fields["memory_dir"]),
            data_dir=Path(fields["data_dir"]),
            committed_step=int(fields["committed_step"]),
            skipped=tuple(
                StepRange(first=int(first), last=int(last)) for first, last in fields["skipped"]
            ),
            replayed_step=int(fields["replayed_step"]),
            suspects=tuple(fields["suspects"]),
            chosen=tuple(ChosenStart(**each) for each in fields["chosen"]),
            checkpoint_url=str(fields["checkpoint_url"]),
            forked_at_ns=int(fields["forked_at_ns"]),
            device=str(fields["device"]),
        )
