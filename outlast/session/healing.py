"""Ranks of a script that live on: when a peer is lost, those that are left call the script's
function again, in the same process.

The agent asks a rank to leave its attempt (`trainer.worker.line`). That ends the connections that
were made since `run` was called, and aborts torch's groups on a GPU, so that whatever the script
waits for fails; what it raises then ends here. The rank says that it has left, gets the contract of
the next attempt, and calls the function again. A process that does not leave in time is killed, and
made anew as without this.

What does not belong here: what a script sees of it (`outlast.session.healing`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import distributed as dist

from diagnostics.core.exits import ExitFacts, classify
from outlast.failures import FailureClass
from outlast.session.process import Session
from outlast.worker_contract import WorkerContract, WorkerExitCode
from trainer.parallel.aborting import LIVES_ON, abort_backends, settle
from trainer.parallel.comm import PeerLostError
from trainer.parallel.connections import open_sockets
from trainer.worker.line import AgentLine
from trainer.worker.programs import log_to
from trainer.worker.reports import write_error

Result = TypeVar("Result")
# A script that raises takes so long at most to end: what it raised is to be known before anybody
# says that it is gone.
_CULPRIT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Ended(Generic[Result]):
    """The function has come to its end."""

    result: Result


@dataclass(frozen=True, slots=True)
class _Leaves:
    """The rank leaves its attempt; `completed`: behind a whole step that was saved."""

    completed: bool


def run(session: Session, train: Callable[[], Result]) -> Result:
    """What `train` returns in the last attempt of this rank.

    Raises:
        Exception: what `train` raises that is no consequence of a lost peer.
        SystemExit: no next attempt came in time.
    """
    contract = session.contract
    if contract.device == "cuda":
        for name, value in LIVES_ON.items():
            os.environ.setdefault(name, value)
    line = AgentLine(contract.agent_line, attempt=contract.attempt, spared=open_sockets())
    session.line = line
    # What is there by now stays: a full collection, which each attempt ends with, passes it over.
    gc.freeze()
    while True:
        if session.contract.device == "cuda":
            line.holds(_abort_groups)
        outcome = _take_part(session, line, train)
        if isinstance(outcome, _Ended):
            return outcome.result
        # Behind the handlers, so that nothing of the attempt is left: its frames were the error's.
        line.abort()
        settle(session.contract.device)
        session.leave()
        _forget_groups(session.contract.device)
        gc.collect()
        line.left(completed=outcome.completed)
        following = line.next_contract(session.patience_s)
        if following is None:
            sys.exit(WorkerExitCode.STOPPED)
        _join(session, following)


def _take_part(
    session: Session, line: AgentLine, train: Callable[[], Result]
) -> _Ended[Result] | _Leaves:
    """One attempt."""
    try:
        result = train()
    except Exception as error:
        if not line.is_open or not (line.is_leaving or _is_of_lost_peer(error)):
            raise
        if not line.is_asked_within(_CULPRIT_S):
            traceback.print_exception(error)
            sys.stderr.flush()
            write_error(session.contract.error_path, error)
            line.leave()
        return _Leaves(completed=False)
    if line.is_leaving:
        # It took what ended its attempt for something of its own.
        return _Leaves(completed=False)
    # Of a stop that all ranks agreed on, those live on that are not told to end.
    if session.is_told_to_stop and not session.has_signal and line.is_open:
        return _Leaves(completed=True)
    return _Ended(result)


def _is_of_lost_peer(error: Exception) -> bool:
    """Whether an exception says that another rank is gone, and nothing of this one."""
    if isinstance(error, PeerLostError):
        return True
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    facts = ExitFacts(
        code=WorkerExitCode.FAILED,
        exception_type=name,
        exception_message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )
    return classify(facts).exit_class is FailureClass.CASCADE


def _join(session: Session, contract: WorkerContract) -> None:
    """Be as a process is that was started for this attempt."""
    log_to(contract.log_path)
    script = contract.script
    assert script is not None, "the contract of a script has one"
    os.environ.update(script.environment)
    os.chdir(script.cwd)
    session.join(replace(contract, script=None))


def _abort_groups() -> None:
    """End what the device has under way in groups of torch's."""
    # torch has no public list of them; its own `_abort_process_group` goes by this one.
    groups: Any = getattr(dist.distributed_c10d._world, "pg_map", {})
    backends = []
    for group in list(groups):
        with contextlib.suppress(RuntimeError):
            backends.append(group._get_backend(torch.device("cuda")))
    abort_backends(backends)


def _forget_groups(device: str) -> None:
    """Have torch know no group any more; the next ones get the names that new processes give."""
    if not dist.is_initialized():
        return
    if device == "cuda":
        # Aborted they are already; an end in order would wait for what they have lost.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
