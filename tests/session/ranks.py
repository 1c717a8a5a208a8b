"""Scripts with a session, as ranks of an attempt that no agent looks after."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from outlast.spec.parse import parse_spec
from outlast.torchrun.environment import RanksOfRun, rank_environment
from outlast.worker_contract import SESSION_FILE
from tests.checkpoint.helpers import uploading
from tests.contracts import contract_of
from tests.session.forking import forking

DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a rank ended."""

    code: int
    log: str

    @property
    def facts(self) -> dict[str, Any]:
        """What the script printed as JSON in its last line."""
        found: dict[str, Any] = json.loads(self.log.splitlines()[-1])
        return found


def run(
    folder: Path,
    script: Path,
    arguments: Sequence[str] = (),
    *,
    imports: Sequence[str] = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor"),
    world_size: int = 2,
    attempt: int = 1,
    checkpoint: Mapping[str, Any] | None = None,
    **contract: Any,
) -> list[Done]:
    """Run a script in these ranks, which have a store; `contract` changes fields of theirs.

    `imports` is what the script imports, and takes long.
    """
    forks = forking(*imports)
    attempt_dir = folder / f"a{attempt}"
    attempt_dir.mkdir(parents=True)
    spec = parse_spec(
        {
            "name": "job",
            "workload": {"command": ["python", str(script)]},
            "resources": {"nodes": world_size},
            "checkpoint": checkpoint or {},
        }
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_of = RanksOfRun(
        run_id="job",
        num_nodes=1,
        workers_per_node=world_size,
        master_addr="127.0.0.1",
        master_port=store.port,
        restart_count=attempt - 1,
    )
    with ExitStack() as opened:
        pids = []
        for rank in range(world_size):
            session_file = attempt_dir / f"{rank}.json"
            made = contract_of(
                attempt_dir,
                rank,
                world_size=world_size,
                attempt=attempt,
                spec_json=spec.canonical_json(),
                rendezvous_port=store.port,
                checkpoint_url=f"file://{folder}/store",
                memory_dir=folder / "memory" / "job-1" / f"rank-{rank:05d}",
                **contract,
            )
            session_file.write_text(json.dumps(made.to_env()))
            environment = {
                **os.environ,
                **rank_environment(
                    run_of, node_index=0, local_rank=rank, error_file="", inherited=os.environ
                ),
                SESSION_FILE: str(session_file),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            command = [str(script), *arguments]
            pid = forks.start(command, environment, attempt_dir / f"{rank}.out")
            opened.callback(forks.kill, pid)
            pids.append(pid)
        codes = [forks.wait(pid, DEADLINE_S) for pid in pids]
    logs = [(attempt_dir / f"{rank}.out").read_text() for rank in range(world_size)]
    return [Done(code=code, log=log) for code, log in zip(codes, logs, strict=True)]


def seen_by(done: Done) -> dict[int, list[float]]:
    """What each step of a rank saw, as its script printed it, and maybe its loss."""
    (line,) = [line for line in done.log.splitlines() if line.startswith('{"')]
    return {int(step): values for step, values in json.loads(line).items()}


@contextmanager
def uploaded(folder: Path, world_size: int) -> Iterator[None]:
    """Beside the block, bring to storage what the session wants there; all of it, at its end."""
    ranks = tuple(range(world_size))
    url, memory = f"file://{folder}/store", folder / "memory" / "job-1"
    with uploading(url, memory, local=ranks, savers=ranks) as (uploader, news):
        yield
        assert uploader.drain(DEADLINE_S), news.trouble
