"""What a script finds under `outlast run` that it does not find so under torchrun, and why.

`docs/reference/scripts.md` has the same table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A row of the table; `names` are those that a comparison has for it."""

    names: tuple[str, ...]
    what: str
    torchrun: str
    outlast: str
    why: str
    cases: tuple[str, ...] = ()
    """Where there may be the difference; everywhere unless given."""

    @property
    def row(self) -> str:
        """As Markdown."""
        return f"| {self.what} | {self.torchrun} | {self.outlast} | {self.why} |"


DIFFERENCES = (
    Difference(
        names=("environment: MASTER_ADDR", "environment: MASTER_PORT"),
        what="`MASTER_ADDR`, `MASTER_PORT`",
        torchrun="of the rendezvous, or as `--master-addr` says",
        outlast="of the agent of rank 0",
        why="that agent hosts the store, so there is no rendezvous to configure",
    ),
    Difference(
        names=("environment: TORCHELASTIC_RUN_ID",),
        what="`TORCHELASTIC_RUN_ID` without `--rdzv-id`",
        torchrun="a new UUID",
        outlast="the id of the job",
        why="it is the id that `outlast logs` and the other commands take",
        cases=("restart", "exit", "raise", "module", "program", "stop"),
    ),
    Difference(
        names=("environment: TORCHELASTIC_MAX_RESTARTS",),
        what="`TORCHELASTIC_MAX_RESTARTS` without `--max-restarts`",
        torchrun="0",
        outlast="10",
        why="faults are survived unless the command says otherwise",
        cases=("stop",),
    ),
    Difference(
        names=("environment: TORCHELASTIC_ERROR_FILE",),
        what="`TORCHELASTIC_ERROR_FILE`",
        torchrun="below `--log-dir`",
        outlast="in the job's folder on the node",
        why="the agent reads it for the incident; its content is the same",
    ),
    Difference(
        names=("environment: TORCHELASTIC_SIGNALS_TO_HANDLE",),
        what="`TORCHELASTIC_SIGNALS_TO_HANDLE`",
        torchrun="set",
        outlast="not set",
        why="only torchrun's own agent reads it",
    ),
    Difference(
        names=("environment: OUTLAST_WORKER", "environment: OUTLAST_SESSION_FILE"),
        what="`OUTLAST_WORKER`, `OUTLAST_SESSION_FILE`",
        torchrun="not set",
        outlast="set",
        why="an agent finds its ranks by the first, `outlast.session` its job by the second",
    ),
    Difference(
        names=("environment: NCCL_HOSTID",),
        what="`NCCL_HOSTID` on nodes of `outlast run` and `outlast demo`",
        torchrun="not set",
        outlast="the node's name",
        why="such nodes may share a GPU, which NCCL refuses to two ranks of one host",
    ),
    Difference(
        names=("process: stdin",),
        what="standard input",
        torchrun="that of the command",
        outlast="empty",
        why="ranks belong to a node's agent, which may be on another machine",
    ),
    Difference(
        names=("process: leads a session",),
        what="session (`setsid`)",
        torchrun="each rank leads its own",
        outlast="that of the node's agent; each rank leads a process group",
        why="everything that runs on a node is found by it; neither has a terminal",
    ),
    Difference(
        names=("process: unbuffered", "process: orig_argv"),
        what="`--no-python python SCRIPT`",
        torchrun="the first `python` of the `PATH`, its output buffered",
        outlast="as without `--no-python`: Outlast's own interpreter, unbuffered",
        why="to a job both are one command; `--no-python /a/path/to/python` chooses another",
        cases=("program",),
    ),
    Difference(
        names=("group: keys of an earlier attempt",),
        what="keys that an earlier attempt left in the store",
        torchrun="are there (torch 2.13, one node)",
        outlast="never",
        why="each attempt has a new store; ranks cannot find addresses of dead ones",
        cases=("restart",),
    ),
    Difference(
        names=("launcher: code",),
        what="exit code of the command after a rank's failure or a stop",
        torchrun="1",
        outlast="that of the rank, or 128 + N after signal N",
        why="a scheduler or shell script can tell failures apart",
        cases=("exit", "program", "stop"),
    ),
    Difference(
        names=("launcher: stopped_by",),
        what="signal of ranks after Ctrl-C",
        torchrun="SIGINT",
        outlast="SIGTERM",
        why="a job has one stop signal (`stop_signal`), whoever asks for the stop",
        cases=("stop",),
    ),
)


def allowed(case: str) -> set[str]:
    """Names of what may differ in a case."""
    rows = (each for each in DIFFERENCES if not each.cases or case in each.cases)
    return {name for each in rows for name in each.names}
