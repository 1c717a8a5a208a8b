"""What a command line of torchrun asks for, and what in it has no effect here.

A launcher that takes the place of torchrun reads the same flags and PET_ variables
(`run_options`).
How the flags are spelled: `outlast.torchrun.parser`.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Literal

from outlast.torchrun.parser import PREFIX, FlagError, add_own_flags, flag_parser

PROGRAM = "outlast run"
# By whichever machine the ranks run on; numbers are not.
Counted = Literal["auto", "cpu", "gpu", "xpu"]
_COUNTED: dict[str, Counted] = {"auto": "auto", "cpu": "cpu", "gpu": "gpu", "xpu": "xpu"}
_STREAMS = re.compile(r"[0-3]")
_STREAMS_BY_RANK = re.compile(r"\d+:[0-3](,\d+:[0-3])*")
# What is said of a flag that was given, and does not do here what it does with torchrun.
_OUTLAST_MEETS = "ranks meet at a store that the agent of rank 0 hosts"
_PLACES = "ranks are placed by the controller: give the command once, not once on each node"
NO_EFFECT = {
    "rdzv_backend": _OUTLAST_MEETS,
    "rdzv_endpoint": _OUTLAST_MEETS,
    "rdzv_conf": _OUTLAST_MEETS,
    "master_addr": _OUTLAST_MEETS,
    "master_port": _OUTLAST_MEETS,
    "local_addr": "each agent has its own address",
    "node_rank": _PLACES,
    "monitor_interval": "an agent learns at once that a rank has ended",
    "start_method": "ranks are forked from a standby process, or executed",
    "event_log_handler": "incidents and events are the controller's",
    "logs_specs": "output is kept by the agent of each node",
    "duplicate_stdout_filters": "filter the output with `outlast logs`",
    "duplicate_stderr_filters": "filter the output with `outlast logs`",
    "run_path": "a Python script runs as runpy.run_path runs it in any case",
    "virtual_local_rank": "ranks see all GPUs of their node",
    "numa_binding": "ranks are not bound to CPUs",
    "signals_to_handle": "SIGINT, SIGTERM, SIGHUP and SIGQUIT stop the job",
}
# Whether they were given makes a difference.
_NOT_BY_DEFAULT = ("nnodes", "max_restarts")
# The backend that --standalone implies, and the one that a single machine needs no more than that.
_USUAL_BACKENDS = ("static", "c10d")


class Streams(IntFlag):
    """Output streams of a rank, as torchrun numbers them."""

    NONE = 0
    STDOUT = 1
    STDERR = 2
    BOTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChoice:
    """Which streams of which local ranks: `every`, or by local rank what `some` says."""

    every: Streams = Streams.NONE
    some: tuple[tuple[int, Streams], ...] = ()

    def of(self, local_rank: int) -> Streams:
        """Those of one local rank."""
        return dict(self.some).get(local_rank, self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to run, where, and what to do with its output."""

    min_nodes: int
    max_nodes: int
    workers_per_node: int | Counted
    max_restarts: int | None
    """None unless given: torchrun's own default, none at all, is for Outlast to override."""
    run_id: str | None
    """Of TORCHELASTIC_RUN_ID, as --rdzv-id gives it; None where it is made up."""
    role: str
    script: str
    script_args: tuple[str, ...]
    is_module: bool
    """The script is a module's name."""
    is_program: bool
    """The script is executed itself."""
    log_dir: str | None
    redirects: StreamChoice
    tee: StreamChoice
    shown_local_ranks: tuple[int, ...]
    """Whose output is shown; empty: of all."""
    stop_grace_s: int | None
    """How long ranks may take to stop before they are killed; None: as the job says."""
    warnings: tuple[str, ...]
    """Flags that were given and have no effect, a line each, with the reason."""
    local_nodes: int
    """Nodes to start on this machine, where no server is given: `max_nodes` and spares."""
    server: str
    """host:port of the controller to run under; "" for one of its own."""
    code: str
    """Folder that is sent along; "" where nodes have the script."""


def run_options(argv: Sequence[str], environ: Mapping[str, str], prog: str = PROGRAM) -> RunOptions:
    """What the words after `torchrun` ask for; the first that is no flag is the script.

    Raises:
        FlagError: torchrun would refuse them; or a value is none that it could run with.
        HelpWantedError: they ask for help.
    """
    parser = flag_parser(environ, prog)
    add_own_flags(parser)
    # What is set already keeps its value unless the flag is given.
    unset = {name: None for name in _NOT_BY_DEFAULT if f"{PREFIX}{name.upper()}" not in environ}
    given = parser.parse_args(list(argv), Namespace(**unset))
    usual = flag_parser({}, prog).parse_args(["script"])
    try:
        return _options(given, _warnings(given, usual))
    except ValueError as error:
        if isinstance(error, FlagError):
            raise
        parser.error(str(error))


def _options(given: Namespace, warnings: tuple[str, ...]) -> RunOptions:
    local_nodes, min_nodes, max_nodes = _sizes(given)
    if given.no_python and given.module and not given.run_path:
        raise ValueError("--no-python and --module exclude each other")
    if given.run_path and given.module:
        raise ValueError("--run-path and --module exclude each other")
    if given.code and not given.server:
        raise ValueError("--code goes with --server; on this machine a script runs where it is")
    return RunOptions(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        workers_per_node=_workers(given.nproc_per_node),
        max_restarts=(
            None
            if given.max_restarts is None
            else _at_least("--max-restarts", given.max_restarts, 0)
        ),
        run_id=_run_id(given),
        role=given.role,
        script=given.training_script,
        script_args=tuple(given.training_script_args),
        is_module=given.module,
        is_program=given.no_python and not given.run_path,
        log_dir=given.log_dir,
        redirects=_streams("--redirects", given.redirects),
        tee=_streams("--tee", given.tee),
        shown_local_ranks=_local_ranks(given.local_ranks_filter),
        stop_grace_s=_grace(given.shutdown_timeout),
        warnings=warnings,
        local_nodes=local_nodes,
        server=given.server,
        code=given.code,
    )


def _sizes(given: Namespace) -> tuple[int, int, int]:
    """Nodes to start here, and the fewest and the most that the script runs on."""
    nodes = None if given.nodes is None else _at_least("--nodes", given.nodes, 1)
    if given.nnodes is None:
        return (nodes or 1,) * 3
    least, most = _nodes(given.nnodes)
    if nodes is None:
        return most, least, most
    if given.server:
        raise ValueError("--nodes and --nnodes mean the same with --server; give one of them")
    if nodes < least:
        raise ValueError(f"--nodes is {nodes}, and --nnodes {given.nnodes} needs {least} of them")
    return nodes, least, min(most, nodes)


def _warnings(given: Namespace, usual: Namespace) -> tuple[str, ...]:
    found = []
    for name, why in NO_EFFECT.items():
        value = getattr(given, name)
        is_usual = name == "rdzv_backend" and value in _USUAL_BACKENDS
        if value != getattr(usual, name) and not is_usual:
            shown = ",".join(value) if isinstance(value, list) else value
            flag = f"--{name.replace('_', '-')}"
            given_as = flag if value is True else f"{flag} {shown}"
            found.append(f"{given_as} has no effect with {PROGRAM}: {why}")
    return tuple(found)


def _nodes(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    try:
        found = int(least), int(most if colon else least)
    except ValueError as error:
        raise ValueError(f"--nnodes is {text!r}; allowed: N or MIN:MAX") from error
    if not 0 < found[0] <= found[1]:
        raise ValueError(f"--nnodes is {text!r}; allowed: 0 < MIN <= MAX")
    return found


def _workers(text: str) -> int | Counted:
    if text in _COUNTED:
        return _COUNTED[text]
    try:
        number = int(text)
    except ValueError as error:
        allowed = ", ".join(_COUNTED)
        raise ValueError(
            f"--nproc-per-node is {text!r}; allowed: a number, or one of {allowed}"
        ) from error
    return _at_least("--nproc-per-node", number, 1)


def _run_id(given: Namespace) -> str | None:
    """torchrun makes one up where it makes the rendezvous up, and for --standalone always."""
    is_made_up = given.standalone or (
        given.rdzv_backend == "static"
        and not given.rdzv_endpoint
        and given.master_port is None
        and _sizes(given)[2] == 1
    )
    return None if is_made_up else str(given.rdzv_id)


def _streams(flag: str, text: str) -> StreamChoice:
    if _STREAMS.fullmatch(text):
        return StreamChoice(every=Streams(int(text)))
    if not _STREAMS_BY_RANK.fullmatch(text):
        raise ValueError(
            f"{flag} is {text!r}; allowed: 0, 1, 2 or 3, or LOCAL_RANK:NUMBER pairs such as 0:1,1:3"
        )
    pairs = (each.split(":") for each in text.split(","))
    by_rank = {int(rank): Streams(int(number)) for rank, number in pairs}
    return StreamChoice(some=tuple(by_rank.items()))


def _local_ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(each) for each in text.split(",")})) if text else ()
    except ValueError as error:
        raise ValueError(
            f"--local-ranks-filter is {text!r}; allowed: local ranks with commas between, as 0,1"
        ) from error


def _grace(seconds: int | None) -> int | None:
    return None if seconds is None else _at_least("--shutdown-timeout", seconds, 0)


def _at_least(flag: str, value: int, least: int) -> int:
    if value < least:
        raise ValueError(f"{flag} is {value}; allowed: {least} or more")
    return value
