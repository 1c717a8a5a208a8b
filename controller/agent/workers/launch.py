"""From a start command to worker assignments, and what must be true before.

Whatever the node lacks is found here, before a process is made, and named by
who can do something about it: the user (config) or another node (resource).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint import memory_check
from checkpoint.core import names
from checkpoint.errors import StorageTimeoutError, StorageUnavailableError
from checkpoint.storage.root_owner import Owner, claim
from checkpoint.storage.storage import Storage
from controller.agent.config import AgentConfig
from controller.agent.memory.uploads import UploadPlan
from controller.agent.observe.capacity import count_gpus
from controller.agent.threads import HungCallsError, run_blocking
from controller.agent.workers.supervisor import Launch
from controller.ranknodes import rank_nodes
from outlast.blackbox.records import MAX_COUNT
from outlast.chosen import ChosenStart
from outlast.errors import MisfitError, OccupiedError, OutlastError
from outlast.failures import ErrorKind
from outlast.layout import Layout
from outlast.skipped import StepRange
from outlast.spec import JobSpec
from outlast.spec.parse import accepted_spec
from outlast.v1 import agents_pb2
from outlast.worker_contract import WorkerContract, WorkerFiles

# Exceptions of botocore and google-auth: no credentials, or a parameter that is none.
_OF_SETTINGS = re.compile("Credential|Validation|Profile|ConfigNotFound")


class StartRefusedError(Exception):
    """The workers cannot run here as asked."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def read_spec(spec_json: str) -> JobSpec:
    """The job spec of a start command; StartRefusedError when it is none."""
    try:
        return accepted_spec(json.loads(spec_json))
    except ValueError as error:
        raise StartRefusedError(ErrorKind.CONFIG, str(error)) from error


def choose_device(spec: JobSpec, num_ranks: int, device_dir: Path = Path("/dev")) -> str:
    """cpu or cuda; CUDA needs a GPU for every rank."""
    num_gpus = count_gpus(device_dir)
    match spec.resources.device:
        case "cpu":
            return "cpu"
        case "cuda" if num_gpus < num_ranks:
            raise StartRefusedError(
                ErrorKind.MISFIT,
                f"{num_ranks} workers need a GPU each and this node has {num_gpus}",
            )
        case "cuda":
            return "cuda"
        case "auto":
            return "cuda" if num_gpus >= num_ranks else "cpu"


def check_host_memory(
    config: AgentConfig, job_id: str, spec: JobSpec, start: agents_pb2.StartWorkers
) -> None:
    """Refuse when the slots of a start's ranks do not fit beside what is there."""
    job_dir = config.job_memory_dir(job_id)
    try:
        memory_check.check_host_memory(spec, start.ranks, job_dir, shift=start.replica_shift)
    except MisfitError as error:
        raise StartRefusedError(ErrorKind.MISFIT, str(error)) from error
    except OccupiedError as error:
        raise StartRefusedError(ErrorKind.OCCUPIED, str(error)) from error


async def check_storage(url: str, owner: Owner | None, timeout_s: float) -> None:
    """Refuse when the job cannot keep checkpoints at `url`, before hours are trained.

    Storage that does not answer, or not now, is of kind STORAGE: another try may be answered.
    """

    def check() -> None:
        storage = Storage(url)
        storage.probe()
        if owner is not None:
            claim(storage, owner)

    try:
        async with asyncio.timeout(timeout_s):
            await run_blocking(check, "storage-probe")
    except TimeoutError as error:
        raise StartRefusedError(
            ErrorKind.STORAGE, f"checkpoint storage {url}: no answer in {timeout_s:g} s"
        ) from error
    except (OutlastError, ValueError, OSError) as error:
        kind = ErrorKind.STORAGE if _may_answer_later(error) else ErrorKind.CONFIG
        place = f"checkpoint storage {url}: "
        raise StartRefusedError(kind, place + str(error).removeprefix(place)) from error


def _may_answer_later(error: Exception) -> bool:
    """Whether storage was silent or out of order, and did not refuse."""
    if isinstance(error, StorageTimeoutError | HungCallsError):
        return True
    if not isinstance(error, StorageUnavailableError) or error.lasting:
        return False
    # Clients of stores have exceptions of their own for settings that no waiting changes.
    name = type(error.__cause__).__name__
    return isinstance(error.__cause__, OSError) or not _OF_SETTINGS.search(name)


def make_launches(
    config: AgentConfig,
    command: agents_pb2.Command,
    *,
    device: str,
    rendezvous_fd: int,
    requested_ns: int,
    agent_line: str = "",
) -> list[Launch]:
    """What to tell the workers of a start command, with their folders made."""
    start = command.start_workers
    attempt_dir = config.attempt_dir(command.job_id, command.attempt)
    attempt_dir.mkdir(parents=True, exist_ok=True)
    spec = json.loads(start.spec_json)
    layout = _layout(spec["parallel"])
    nodes = rank_nodes(start)
    lives_on = is_healed(spec)
    launches = []
    for local_rank, rank in enumerate(start.ranks):
        paths = WorkerFiles.below(attempt_dir, rank)
        contract = _contract(config, command, paths, rank=rank, rank_nodes=tuple(nodes))
        contract.memory_dir.mkdir(parents=True, exist_ok=True)
        launches.append(
            Launch(
                contract=replace(
                    contract,
                    local_rank=local_rank,
                    # Any of them may be the first one at another size.
                    rendezvous_fd=rendezvous_fd if rank == 0 or lives_on else None,
                    device=device,
                    agent_line=agent_line if lives_on else "",
                ),
                paths=paths,
                requested_ns=requested_ns,
                stage=layout.coordinate(rank).pp,
                total_steps=int(spec.get("steps", MAX_COUNT)),
            )
        )
    return launches


def _layout(parallel: Mapping[str, int]) -> Layout:
    """Of the section of a spec, which may be of a controller that knows fewer degrees."""
    # Context ranks have a place among replicas, as in `JobSpec.layout`.
    replicas = parallel["dp"] * parallel.get("cp", 1)
    return Layout(tp=parallel["tp"], pp=parallel["pp"], dp=replicas)


def is_healed(spec: Mapping[str, Any]) -> bool:
    """Whether ranks leave an attempt and live on for the next one."""
    return bool(spec.get("recovery", {}).get("heal"))


def _contract(
    config: AgentConfig,
    command: agents_pb2.Command,
    paths: WorkerFiles,
    *,
    rank: int,
    rank_nodes: tuple[str, ...],
) -> WorkerContract:
    """What the order says to one rank; its place on this node is the caller's to add."""
    start = command.start_workers
    return WorkerContract(
        job_id=command.job_id,
        attempt=command.attempt,
        rank=rank,
        world_size=start.world_size,
        local_rank=0,
        rank_nodes=rank_nodes,
        spec_json=start.spec_json,
        rendezvous_host=start.rendezvous_host,
        rendezvous_port=start.rendezvous_port,
        rendezvous_fd=None,
        log_path=paths.log,
        error_path=paths.error,
        blackbox_path=paths.blackbox,
        environment_path=paths.environment,
        memory_dir=config.job_memory_dir(command.job_id) / names.memory_folder(rank),
        data_dir=config.data_dir,
        committed_step=start.committed_step,
        skipped=tuple(StepRange(first=each.first, last=each.last) for each in start.skipped),
        replayed_step=start.replayed_step,
        suspects=tuple(start.suspect_nodes),
        chosen=chosen_of(start),
        checkpoint_url=start.checkpoint_url,
        # The standby process puts the real moment here.
        forked_at_ns=0,
        device="",
        replica_shift=start.replica_shift,
    )


def shares_data(spec: JobSpec, ranks: Sequence[int]) -> bool:
    """Whether several of these ranks read data, and one process may do so for them.

    Stages in the middle of a pipeline read nothing, or where documents begin if they need it.
    """
    if spec.is_script or spec.data.loader != "node":
        return False
    ends = (0, spec.parallel.loss_stage)
    stages = [spec.layout.coordinate(rank).pp for rank in ranks]
    return sum(spec.documents_reach_every_stage or stage in ends for stage in stages) > 1


def upload_plan(config: AgentConfig, command: agents_pb2.Command, spec: JobSpec) -> UploadPlan:
    """Who uploads what for the ranks of a start command.

    Every rank has a part of the checkpoint: what it owns, which only the trainer can say.
    """
    start = command.start_workers
    return UploadPlan(
        url=start.checkpoint_url,
        job_id=command.job_id,
        memory_dir=config.job_memory_dir(command.job_id),
        local_ranks=tuple(start.ranks),
        saver_ranks=tuple(range(spec.layout.world_size)),
        is_coordinator=0 in start.ranks,
        timeout_s=spec.checkpoint.upload_timeout_s,
        interval_steps=spec.checkpoint.storage_interval_steps,
        keep=spec.checkpoint.keep,
        keep_every_steps=spec.checkpoint.keep_every_steps,
        keep_best=spec.checkpoint.keep_best,
        memory_bytes=spec.checkpoint.upload_memory_bytes,
        bytes_per_s=spec.checkpoint.upload_bytes_per_s,
        last_step=None if spec.is_script else spec.steps,
        last_timeout_s=spec.checkpoint.last_timeout_s,
        owner=start.owner,
        chosen=chosen_of(start),
    )


def chosen_of(start: agents_pb2.StartWorkers) -> tuple[ChosenStart, ...]:
    """Where persons let the job go on."""
    return tuple(
        ChosenStart(step=each.step, attempt=each.attempt, url=each.url, url_step=each.url_step)
        for each in start.chosen_starts
    )


def owner_of(command: agents_pb2.Command) -> Owner | None:
    """Whose checkpoints a start command is about; None from a controller that does not say."""
    mark = command.start_workers.owner
    return Owner(job_id=command.job_id, mark=mark) if mark else None


def should_try_storage(command: agents_pb2.Command) -> bool:
    """Whether this node should try the storage: rank 0's, until something was committed."""
    start = command.start_workers
    return 0 in start.ranks and start.committed_step < 0


def check_job_id(job_id: str) -> None:
    """Refuse a job id that would lead out of the agent's folders."""
    if os.sep in job_id or job_id in ("", ".", ".."):
        raise StartRefusedError(ErrorKind.CONFIG, f"job id {job_id!r} is no name")
