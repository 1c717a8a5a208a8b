"""What a script may tell Outlast while it trains, and ask of it.

Every call does nothing under plain Python or torchrun, so a script that has them runs anywhere.

    from outlast import session

    checkpoint = session.checkpoint(model=model, optimizer=optimizer, loader=loader)
    for step in range(checkpoint.restore() + 1, last_step + 1):
        loss = train(step)
        session.step(step, loss=loss.item(), tokens=tokens)
        checkpoint.save(step)
        if session.should_stop():
            break

A script whose processes are to live on when a peer is lost puts all of that into a function, and
has it called by `session.healing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from outlast.blackbox import Phase, StepRecord
from outlast.blackbox.records import member
from outlast.clock import node_time_ns
from outlast.session.process import current

if TYPE_CHECKING:
    from outlast.session.checkpoints import Checkpoints

__all__ = ["Checkpoint", "box", "checkpoint", "healing", "is_active", "should_stop", "step"]

Result = TypeVar("Result")


def is_active() -> bool:
    """Whether an agent of Outlast started this process as a rank."""
    return current() is not None


def step(
    step: int,
    *,
    loss: float | None = None,
    tokens: int | None = None,
    grad_norm: float = 0.0,
    learning_rate: float = 0.0,
) -> None:
    """Say that a step is complete: progress, hangs, spikes and stragglers are judged by it.

    Every rank calls it; figures are taken from rank 0. `loss` is the mean over the global batch.
    `tokens` are those of the global batch; unless given, a step counts as one.
    """
    session = current()
    if session is None:
        return
    has_loss = loss is not None
    session.step(
        StepRecord(
            step=step,
            loss=float(loss) if loss is not None else math.nan,
            grad_norm=grad_norm if has_loss else math.nan,
            learning_rate=learning_rate,
            tokens=(1 if tokens is None else tokens) if has_loss else 0,
            start_ns=session.step_began_ns,
            end_ns=node_time_ns(),
            eval_loss=None,
        )
    )


class Checkpoint:
    """Checkpoints of some objects. All ranks call each method at the same step."""

    def __init__(self, checkpoints: Checkpoints | None) -> None:
        self._checkpoints = checkpoints

    def restore(self) -> int:
        """Load the newest state that all ranks can: the step after which it was saved; 0: none."""
        return 0 if self._checkpoints is None else self._checkpoints.restore()

    def save(self, step: int) -> None:
        """Save the state after `step` in host memory; what goes to storage goes in the background.

        As often as a restart may cost so many steps: after each step, if that is worth a copy.
        """
        if self._checkpoints is not None:
            self._checkpoints.save(step)


def checkpoint(
    *, model: Any = None, optimizer: Any = None, loader: Any = None, **stateful: Any
) -> Checkpoint:
    """Checkpoints of a script's objects, each of which has `state_dict` and `load_state_dict`.

    Tensors of a `torch.nn.Module` and of a `torch.optim.Optimizer` are taken to be the same on all
    ranks unless they are DTensors; those of all other objects to be each rank's own. Generators of
    random numbers are saved with them.

    Raises:
        TypeError: an object has no state that could be saved.
    """
    from outlast.session.objects import Objects

    given = {"model": model, "optimizer": optimizer, "loader": loader, **stateful}
    objects = Objects({name: each for name, each in given.items() if each is not None})
    session = current()
    if session is None:
        return Checkpoint(None)
    from outlast.session.checkpoints import Checkpoints

    checkpoints = Checkpoints(session, objects)
    session.checkpoints = checkpoints
    return Checkpoint(checkpoints)


def should_stop() -> bool:
    """Whether the script is to end in order after this step: it is paused, or its node is needed.

    From the first call on, the job's stop signal asks only. All ranks get the same answer where a
    checkpoint is saved in each step; what it saved last goes to storage then.
    """
    session = current()
    if session is None:
        return False
    session.listen()
    if session.checkpoints is not None:
        session.is_told_to_stop = session.checkpoints.should_stop
    else:
        session.is_told_to_stop = session.is_asked_to_stop
    return session.is_told_to_stop


def healing(train: Callable[[], Result]) -> Result:
    """Call `train`, and again in this process each time that another rank is lost.

    With `recovery.heal` in the job's spec; without it, and under plain Python or torchrun, `train`
    is called once. All that belongs to an attempt is made in it: process groups, what wraps a model
    for them (DDP, `fully_shard`), the optimizer, `session.checkpoint`. What was made before the
    call is kept: imports, the device's context, compiled functions, data that was read. A fault
    ends TCP connections that were made since the call, and whatever waits for one raises; what
    `train` raises then must reach its caller.

    Returns:
        What `train` returns when it has come to its end.
    """
    session = current()
    if session is None or not session.contract.agent_line:
        return train()
    from outlast.session.healing import run

    return run(session, train)


@contextmanager
def box(phase: str) -> Iterator[None]:
    """Name what this rank is busy with: data, forward_backward, gradient_sync, optimizer,
    evaluation, checkpoint or garbage_collection. It is what an incident says of a rank that stands.
    """
    session = current()
    if session is None:
        yield
        return
    session.turn_to(member(Phase, phase))
    try:
        yield
    finally:
        session.turn_to(Phase.STEP)
