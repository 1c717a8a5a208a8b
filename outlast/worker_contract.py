"""What the agent of a node and its workers agree on: one rank's part in an attempt, the files that
it writes, its exit codes, and the signal that stops it.

The agent makes a `WorkerContract` for each rank. Its standby process reads it from `to_env`'s
strings and hands it to the worker that it forks. These strings are not the environment of the
worker's process: with thousands of ranks they are longer than the kernel lets a variable be.

What does not belong here: what the job spec means (`outlast.spec`, which needs pydantic), and
what a worker writes into its black box (`outlast.blackbox`).
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from outlast.chosen import ChosenStart
from outlast.enums import StrEnum
from outlast.script_contract import ScriptContract, read_script
from outlast.skipped import StepRange

# In the environment of a worker and of whatever it starts: the worker's key.
WORKER_MARK = "OUTLAST_WORKER"
# Gloo's own variable: the network interface that it uses. The agent sets it, the worker reads it.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# In the environment of a script: the file with the contract of its rank, less the script.
SESSION_FILE = "OUTLAST_SESSION_FILE"
# Asks a worker to stop after its step, with that step saved in host memory.
STOP_SIGNAL = signal.SIGTERM

# Operations, and as many spans, in a black box, where a job asks for no other number; and at most:
# an agent sends a rank's in one message of up to 2.5 MB then, and a page shows 64 ranks.
BLACK_BOX_RECORDS = 4096
MOST_BLACK_BOX_RECORDS = 16_384

_PREFIX = "OUTLAST_"
# torch appends a rank to it.
_FLIGHT_RECORD = "nccl-"
_RANK = re.compile(r"rank-(\d{5,})")

Parsed = TypeVar("Parsed")


class WorkerExitCode(IntEnum):
    """How a worker ends that is not killed."""

    DONE = 0
    """All steps are done."""
    FAILED = 1
    """An exception ended it; its error file says which."""
    STOPPED = 75
    """It stopped because it was asked to. EX_TEMPFAIL of sysexits.h: come back later."""


# Of a worker that SIGKILL ended, as Python counts signals in exit codes.
KILLED = -int(signal.SIGKILL)
# Ends that are no failure.
CLEAN_CODES = (WorkerExitCode.DONE, WorkerExitCode.STOPPED)
# How a worker ends that was asked to stop: killed, before it could listen, after its step, or as
# it ended anyway. Whether it had done all steps by then is another matter.
STOPPED_CODES = (KILLED, -int(STOP_SIGNAL), WorkerExitCode.STOPPED, WorkerExitCode.DONE)


class ErrorField(StrEnum):
    """Fields of a worker's error file."""

    TYPE = "type"
    MESSAGE = "message"
    TRACEBACK = "traceback"
    AT_S = "at_s"


class EnvironmentField(StrEnum):
    """Fields of a worker's environment file."""

    ENVIRONMENT = "environment"
    CHANGES = "changes"
    LEFT_OUT = "left_out"
    NUM_SAMPLES = "num_samples"
    SKIPPED = "skipped"


class ContractError(ValueError):
    """A value of a worker's contract is missing or wrong; the message names its key."""


def rank_name(rank: int) -> str:
    """What the files and folders of a rank are called, without what follows."""
    return f"rank-{rank:05d}"


def parse_rank_name(name: str) -> int | None:
    """The rank of such a name; None for any other name."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFiles:
    """Files of one worker, which it writes and its agent reads."""

    log: Path
    error: Path
    """Why it failed."""
    blackbox: Path
    environment: Path
    """What decides the bits of its arithmetic."""
    session: Path
    """Of a script only, written by the agent: the rank's contract, for `outlast.session`."""

    @classmethod
    def below(cls, attempt_dir: Path, rank: int) -> WorkerFiles:
        """Where they are in the folder of an attempt."""
        return cls(
            log=attempt_dir / f"{rank_name(rank)}.log",
            error=attempt_dir / f"{rank_name(rank)}.error.json",
            blackbox=attempt_dir / f"{rank_name(rank)}.blackbox",
            environment=attempt_dir / f"{rank_name(rank)}.environment.json",
            session=attempt_dir / f"{rank_name(rank)}.session.json",
        )


# Of every rank, for `Path.glob` in the folder of an attempt or of a job's host memory.
ALL_RANKS = "rank-*"
ALL_LOGS = f"{ALL_RANKS}.log"
ALL_BLACKBOXES = f"{ALL_RANKS}.blackbox"


def log_rank(name: str) -> int | None:
    """The rank whose log has this name; None for any other file."""
    stem, dot, suffix = name.partition(".")
    return parse_rank_name(stem) if dot and suffix == "log" else None


def flight_recorder(attempt_dir: Path) -> dict[str, str]:
    """Variables with which NCCL groups record their collectives, to be written down on demand.

    torch makes a named pipe `nccl-<rank>.pipe`; whoever writes to it has a thread of the rank's
    process write the recorder to `nccl-<rank>`.

    Source: DumpPipe in torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp.
    """
    stem = str(attempt_dir / _FLIGHT_RECORD)
    return {
        # Collectives remembered: some steps of a deep pipeline.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem,
        "TORCH_FR_DUMP_TEMP_FILE": stem,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": stem,
    }


def flight_record(attempt_dir: Path, rank: int) -> Path:
    """The file that NCCL's flight recorder of a rank is written to."""
    return attempt_dir / f"{_FLIGHT_RECORD}{rank}"


def flight_record_pipe(attempt_dir: Path, rank: int) -> Path:
    """Where torch's NCCL listens for an order to write its flight recorder down."""
    return flight_record(attempt_dir, rank).with_suffix(".pipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContract:
    """One rank's part in one attempt of a job."""

    job_id: str
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    rank_nodes: tuple[str, ...]
    spec_json: str
    rendezvous_host: str
    rendezvous_port: int
    rendezvous_fd: int | None
    """The agent's listening socket, on rank 0 only."""
    log_path: Path
    error_path: Path
    blackbox_path: Path
    environment_path: Path
    memory_dir: Path
    data_dir: Path
    committed_step: int
    """The newest step that the controller knows to be in storage; 0 or less for none."""
    skipped: tuple[StepRange, ...]
    """Steps whose batch is left out."""
    replayed_step: int
    """A step with a non-finite loss that is done again; 0 for none."""
    suspects: tuple[str, ...]
    """Nodes that took part in it then."""
    chosen: tuple[ChosenStart, ...]
    """Where persons let the job go on, oldest first."""
    checkpoint_url: str
    forked_at_ns: int
    """Set by the standby process when it forks; 0 before."""
    device: str
    data_socket: Path | None = None
    """Where the loader of this node's data answers; None where each rank reads by itself."""
    script: ScriptContract | None = None
    """The user's own program, which the worker then is; None for the trainer."""
    agent_line: str = ""
    """Where the agent listens (`outlast.worker_line`); "": the process ends with its attempt."""
    replica_shift: int = 0
    """By how many nodes the keeper of a node's copies is behind it; 0: as the layout has it."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise _wrong("world_size", self.world_size, "it must be 1 or more")
        if not 0 <= self.rank < self.world_size:
            raise _wrong("rank", self.rank, f"it must be in 0..{self.world_size - 1}")
        if len(self.rank_nodes) != self.world_size:
            expected = f"it must name the node of each of {self.world_size} ranks"
            raise _wrong("rank_nodes", f"{len(self.rank_nodes)} names long", expected)
        if self.attempt < 1:
            raise _wrong("attempt", self.attempt, "it must be 1 or more")

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this one's node."""
        own = self.rank_nodes[self.rank]
        return tuple(rank for rank, node in enumerate(self.rank_nodes) if node == own)

    def to_env(self) -> dict[str, str]:
        """As strings, by key; `from_env` reads them back."""
        return {key_of(each.name): _text_of(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> WorkerContract:
        """What `to_env` gave; keys that are of no field are ignored.

        Raises:
            ContractError: a key is missing or its value is none of its field; it is named.
        """
        read = _Reader(env)
        descriptor = read.text("rendezvous_fd")
        return cls(
            job_id=read.text("job_id"),
            attempt=read.number("attempt"),
            rank=read.number("rank"),
            world_size=read.number("world_size"),
            local_rank=read.number("local_rank"),
            rank_nodes=read.names("rank_nodes"),
            spec_json=read.text("spec_json"),
            rendezvous_host=read.text("rendezvous_host"),
            rendezvous_port=read.number("rendezvous_port"),
            rendezvous_fd=read.number("rendezvous_fd") if descriptor else None,
            log_path=read.path("log_path"),
            error_path=read.path("error_path"),
            blackbox_path=read.path("blackbox_path"),
            environment_path=read.path("environment_path"),
            memory_dir=read.path("memory_dir"),
            data_dir=read.path("data_dir"),
            committed_step=read.number("committed_step"),
            skipped=read.several("skipped", _step_range),
            replayed_step=read.number("replayed_step"),
            suspects=read.names("suspects"),
            chosen=read.several("chosen", _chosen_start),
            checkpoint_url=read.text("checkpoint_url"),
            forked_at_ns=read.number("forked_at_ns"),
            device=read.text("device"),
            data_socket=read.path("data_socket") if read.text("data_socket") else None,
            script=read.script("script"),
            agent_line=read.text("agent_line"),
            replica_shift=read.number("replica_shift"),
        )


def key_of(field: str) -> str:
    """The key of a field of the contract."""
    return f"{_PREFIX}{field.upper()}"


@dataclass(frozen=True, slots=True)
class _Reader:
    """Fields out of strings; every error names the key."""

    env: Mapping[str, str]

    def text(self, field: str) -> str:
        try:
            return self.env[key_of(field)]
        except KeyError as error:
            raise ContractError(
                f"{key_of(field)} is missing in what the agent gave this worker; "
                "agent and worker must be of the same installation"
            ) from error

    def number(self, field: str) -> int:
        text = self.text(field)
        try:
            return int(text)
        except ValueError as error:
            raise _wrong(field, repr(text), "it must be a whole number") from error

    def path(self, field: str) -> Path:
        text = self.text(field)
        if not text:
            raise _wrong(field, repr(text), "it must be a path")
        return Path(text)

    def names(self, field: str) -> tuple[str, ...]:
        return self.several(field, _name)

    def script(self, field: str) -> ScriptContract | None:
        text = self.text(field)
        try:
            return read_script(json.loads(text)) if text else None
        except (ValueError, TypeError, RecursionError) as error:
            raise _wrong(field, repr(text[:100]), f"it must be a script ({error})") from error

    def several(self, field: str, parse: Callable[[object], Parsed]) -> tuple[Parsed, ...]:
        text = self.text(field)
        try:
            document = json.loads(text)
            if not isinstance(document, list):
                raise TypeError("no list")
            return tuple(parse(each) for each in document)
        except (ValueError, TypeError, RecursionError) as error:
            raise _wrong(field, repr(text[:100]), f"it must be a JSON list ({error})") from error


def _text_of(value: object) -> str:
    match value:
        case None:
            return ""
        case ScriptContract():
            return json.dumps(asdict(value))
        case tuple():
            return json.dumps([each if isinstance(each, str) else asdict(each) for each in value])
        case _:
            return str(value)


def _name(item: object) -> str:
    if not isinstance(item, str):
        raise TypeError(f"{item!r} is no string")
    return item


def _step_range(item: object) -> StepRange:
    match item:
        case {"first": int(first), "last": int(last), **more} if not more:
            return StepRange(first=first, last=last)
    raise TypeError(f"{item!r} is no range of steps")


def _chosen_start(item: object) -> ChosenStart:
    match item:
        case {
            "step": int(step),
            "attempt": int(attempt),
            "url": str(url),
            "url_step": int(url_step),
            **more,
        } if not more:
            return ChosenStart(step=step, attempt=attempt, url=url, url_step=url_step)
    raise TypeError(f"{item!r} is no chosen start")


def _wrong(field: str, value: object, expected: str) -> ContractError:
    return ContractError(f"{key_of(field)} is {value}; {expected}")
