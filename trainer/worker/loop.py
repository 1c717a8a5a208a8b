"""The training loop: what one rank does in one step, top to bottom.

Besides the gradients, ranks agree on a few numbers once per step, in one small
message per axis: the gradient norm and the loss, the newest step that all have
sealed in host memory, whether an upload or a copy to another node is under way, and
whether anyone was asked to stop. So all decisions below are the same on every rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from checkpoint.core.saving import Held, SavePlan
from outlast.blackbox import Phase, StartMark, StepRecord, Writer
from outlast.clock import node_time_ns
from outlast.crashpoints import CrashPoint, reach
from outlast.perplexity import perplexity
from outlast.skipped import StepRange, is_skipped, is_undone, num_skipped
from trainer.optim.clip import clip_gradients, squared_norm_share
from trainer.optim.norms import sum_in_order
from trainer.recovery import non_finite
from trainer.recovery.replay import Replay
from trainer.worker.garbage import collect, collected_at_steps, is_due
from trainer.worker.held_out import held_out_losses
from trainer.worker.loss_factors import loss_factors
from trainer.worker.state import TrainState


class Saver(Protocol):
    """Stage 1 of a checkpoint, as `checkpoint.stage.stager.Stager` has it."""

    @property
    def newest_sealed(self) -> int: ...

    @property
    def upload_busy(self) -> bool: ...

    @property
    def is_replicated(self) -> bool: ...

    @property
    def newest_replicated(self) -> int: ...

    @property
    def replica_busy(self) -> bool: ...

    def save(
        self,
        step: int,
        extra: dict[str, Any],
        *,
        upload: bool,
        common_step: int,
        replicate: bool,
        replicated_step: int,
    ) -> bool: ...

    def wait_before_write(self, tensor: Tensor) -> None: ...

    def finish(self, timeout_s: float | None = None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know alike at the end of a step's backward passes."""

    grad_norm: float
    loss: float
    held: Held
    stop: bool


class TrainLoop:
    """Runs steps until the last one, or until any rank is asked to stop."""

    def __init__(
        self,
        state: TrainState,
        box: Writer,
        saver: Saver,
        *,
        skipped: Sequence[StepRange] = (),
        replay: Replay | None = None,
        stop_requested: Callable[[], bool],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` raises where numbers that a device gives may have come to nothing."""
        self._state = state
        self._spec = state.spec
        self._mesh = state.mesh
        self._box = box
        self._saver = saver
        self._skipped = skipped
        self._replay = replay
        self._stop_requested = stop_requested
        self._check = check
        # The step whose state the tensors hold; None while they change.
        self.present_step: int | None = None
        settings = state.spec.checkpoint
        self._plan = SavePlan(
            storage_interval_steps=settings.storage_interval_steps,
            memory_interval_steps=settings.memory_interval_steps,
            is_replicated=saver.is_replicated,
        )
        # The newest one of this attempt: what a checkpoint is rated by.
        self._evaluation: dict[str, Any] | None = None
        self._first = True
        # This rank's share of the loss of the present step.
        self._own_loss = torch.zeros((), dtype=torch.float64)
        # Micro-batch losses are sums over tokens; this makes them parts of the global mean.
        self._tokens = self._spec.data.global_batch * self._spec.model.seq_len

    def run(self, resumed_step: int) -> bool:
        """Train on from `resumed_step`; True when all steps are done."""
        self._plan.resumed(resumed_step)
        with collected_at_steps():
            for step in range(resumed_step + 1, self._spec.steps + 1):
                if is_skipped(self._skipped, step):
                    agreed = self._leave_out(step)
                else:
                    agreed = self.train_step(step)
                if agreed is not None and agreed.stop and step < self._spec.steps:
                    return self._end(done=False)
                self._collect_garbage(step)
            return self._end(done=True)

    def _collect_garbage(self, step: int) -> None:
        """Not after the last step: no other rank waits for what this one does then."""
        if step < self._spec.steps and is_due(step, self._spec.garbage_interval_steps):
            self._box.phase(Phase.GARBAGE_COLLECTION)
            collect()

    def _end(self, *, done: bool) -> bool:
        """Leave nothing under way: on a GPU, `drain` only tells the device to wait."""
        self._state.data_parallel.drain()
        self._state.data.train.close()
        # A process that ends while it sends takes its peers' results with it.
        self._await_device(self._spec.recovery.hang_timeout_s)
        self._saver.finish(self._spec.recovery.hang_timeout_s)
        return done

    def train_step(self, step: int) -> Agreed:
        """One optimizer step, its record and its checkpoint."""
        state, box = self._state, self._box
        start_ns = box.begin_step()
        scale = 1.0 if state.loss_scale is None else state.loss_scale.scale
        replay = self._replay_of(step, scale)
        state.meter.begin(box.add_span)
        box.phase(Phase.DATA)
        state.data_parallel.prefetch()
        micro_batches = state.data.train.micro_batches(step)
        factors = loss_factors(state, micro_batches, scale)

        box.phase(Phase.FORWARD_BACKWARD)
        self._prepare_next(step, computes=True)
        state.data_parallel.begin_step(len(micro_batches))
        loss = state.train_engine.run(micro_batches, factors, step=step)

        box.phase(Phase.GRADIENT_SYNC)
        self._prepare_next(step, computes=False)
        state.data_parallel.finish_gradients()
        if replay is not None:
            replay.compare(loss)
        agreed = self._agree(loss, scale)
        reach(CrashPoint.STEP_AGREED)

        box.phase(Phase.OPTIMIZER)
        learning_rate = state.learning_rate.at(step)
        if self._is_usable(step, agreed):
            self._update(step, learning_rate, agreed.grad_norm, scale)
        # Sealed before this step is reported, so that a kill never costs more than one.
        self._saver.finish()
        waited_ns = state.data.train.last_wait_ns
        box.used(state.meter.take(state.train_engine.last_timing, data_wait_ns=waited_ns))
        eval_losses = self._evaluate(step) if self._evaluates(step) else {}
        # The record comes before the checkpoint: a step that could be resumed from
        # but was never reported would leave a gap in the loss curve.
        record = StepRecord(
            step=step,
            loss=agreed.loss,
            grad_norm=agreed.grad_norm,
            learning_rate=learning_rate,
            tokens=self._tokens,
            start_ns=start_ns,
            end_ns=node_time_ns(),
            eval_loss=self._evaluation["loss"] if eval_losses and self._evaluation else None,
            eval_losses={name: loss for name, loss in eval_losses.items() if name},
        )
        self._completed(record)
        self._checkpoint(step, agreed)
        return agreed

    def _prepare_next(self, step: int, *, computes: bool) -> None:
        """Have the next step's batch at hand when that begins.

        A rank reads while gradients are on their way; what the node's loader has read before
        only has to be fetched, for which there is the whole step.
        """
        data = self._state.data.train
        is_next = step < self._spec.steps and not is_skipped(self._skipped, step + 1)
        if is_next and data.reads_elsewhere is computes:
            data.prepare(step + 1)

    def _replay_of(self, step: int, scale: float) -> Replay | None:
        """The comparison to make of this step, if it is the one that is done again."""
        replay = self._replay
        if replay is None or replay.step != step:
            return None
        own = self._state.data.train.micro_batches(step)
        replay.compute_other(loss_factors(self._state, own, scale))
        # Its passes are none of the step's.
        self._mesh.timeline.finish(self._spec.recovery.hang_timeout_s)
        return replay

    def _leave_out(self, step: int) -> Agreed | None:
        """A step without its batch: nothing changes but the step number.

        Within a range nothing is agreed upon, since nothing may be saved there: after a
        rollback, states of the same steps and of another history exist.
        """
        at_ns = self._box.begin_step()
        self._completed(
            StepRecord(
                step=step,
                # There is none, and no tokens say that it was left out.
                loss=math.nan,
                grad_norm=math.nan,
                learning_rate=self._state.learning_rate.at(step),
                tokens=0,
                start_ns=at_ns,
                end_ns=at_ns,
                eval_loss=None,
            )
        )
        if is_undone(self._skipped, step):
            return None
        self._box.phase(Phase.GRADIENT_SYNC)
        nothing = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        agreed = self._agree_on(nothing, nothing, 1.0)
        self._checkpoint(step, agreed)
        return agreed

    def _completed(self, record: StepRecord) -> None:
        self._box.completed(record)
        if self._first:
            self._first = False
            self._box.mark(StartMark.FIRST_STEP)

    def _is_usable(self, step: int, agreed: Agreed) -> bool:
        """Whether the gradients can be used; False when they overflowed and are skipped.

        Raises:
            non_finite.NonFiniteLossError: and no smaller loss scale would help.
        """
        scale = self._state.loss_scale
        if math.isfinite(agreed.loss) and math.isfinite(agreed.grad_norm):
            if scale is not None:
                scale.advance()
            return True
        if scale is None or scale.is_smallest or not math.isfinite(agreed.loss):
            if self._spec.detectors.non_finite != "act":
                return self._spec.detectors.non_finite == "off"
            non_finite.fail(
                self._state,
                step,
                loss=agreed.loss,
                own_loss=self._own_loss,
                grad_norm=agreed.grad_norm,
            )
        if self._mesh.rank == 0:
            print(
                f"step {step}: overflow at loss scale {scale.scale}; skipped",
                file=sys.stderr,
                flush=True,
            )
        scale.shrink()
        return False

    def _update(self, step: int, learning_rate: float, grad_norm: float, scale: float) -> None:
        state = self._state
        self.present_step = None
        clip_gradients(state.flat, grad_norm, self._spec.optimizer.clip_grad_norm, scale=scale)
        # Skipped steps have left the moments as they were, and do not count.
        skipped = num_skipped(self._skipped, step)
        skipped += 0 if state.loss_scale is None else state.loss_scale.skipped
        state.optimizer.step(
            step - skipped,
            learning_rate,
            changes=self._saver.wait_before_write,
            updated=state.data_parallel.updated,
        )
        self.present_step = step

    def _agree(self, loss: Tensor, scale: float) -> Agreed:
        return self._agree_on(squared_norm_share(self._state.flat, self._mesh), loss, scale)

    def _agree_on(self, squared_norm: Tensor, loss: Tensor, scale: float) -> Agreed:
        """What all ranks make of each one's share of the squared norm and of the loss."""
        mesh, saver = self._mesh, self._saver
        # Every tensor rank of the stage with the loss computed the same: the first reports it.
        own_loss = loss.double() if mesh.at.tp == 0 else torch.zeros_like(loss).double()
        self._own_loss = own_loss
        sealed = saver.newest_sealed
        flags = (
            sealed,
            -sealed,
            -int(saver.upload_busy),
            saver.newest_replicated,
            -int(saver.replica_busy),
            -int(self._stop_requested()),
        )
        row = torch.cat(
            (
                torch.stack((squared_norm, own_loss)),
                torch.tensor(flags, dtype=torch.float64, device=mesh.device),
            )
        )
        numbers = self._read(mesh.fold(row, _combine))
        square, scaled_loss, lowest, minus_highest, busy, replicated, copying, stop = numbers
        held = Held(
            lowest_sealed=int(lowest),
            highest_sealed=-int(minus_highest),
            upload_busy=busy < 0,
            newest_replicated=int(replicated),
            replica_busy=copying < 0,
        )
        self._plan.agreed(held)
        norm = math.sqrt(square) / scale
        return Agreed(
            # An overflow gives infinities or their differences: one name for both.
            grad_norm=norm if math.isfinite(norm) else math.inf,
            loss=scaled_loss / scale,
            held=held,
            stop=stop < 0,
        )

    def _read(self, row: Tensor) -> list[float]:
        """The numbers of `row`, for which the host waits."""
        self._await_device()
        numbers: list[float] = row.tolist()
        self._check()
        return numbers

    def _await_device(self, timeout_s: float | None = None) -> None:
        """Follow a GPU to the end of its work; the black box says how far it has come.

        One that hangs does so in an operation that it was given long ago.
        """
        self._box.waits_for_device()
        self._mesh.timeline.finish(timeout_s)

    def _evaluates(self, step: int) -> bool:
        interval = self._spec.eval.interval_steps
        return interval is not None and step % interval == 0

    def _evaluate(self, step: int) -> dict[str, float]:
        """The loss on each held-out set; their mean is what a checkpoint is rated by."""
        self._box.phase(Phase.EVALUATION)
        losses = held_out_losses(self._state, self._tokens, self._read)
        whole = sum(losses.values()) / len(losses)
        self._evaluation = {"step": step, "loss": whole}
        if self._mesh.rank == 0:
            for name, loss in {"": whole, **losses}.items():
                words = f"held-out loss {loss:.4f}, perplexity {perplexity(loss):.4g}"
                print(f"step {step}: {name and name + ': '}{words}", flush=True)
        return losses

    def _checkpoint(self, step: int, agreed: Agreed) -> None:
        stopping = agreed.stop or step == self._spec.steps
        order = self._plan.order(step, agreed.held, stopping=stopping)
        if order is None:
            return
        self._box.phase(Phase.CHECKPOINT)
        extra = {**self._state.extra(step), "evaluation": self._evaluation}
        if self._saver.save(step, extra, **asdict(order)):
            self._plan.saved(order)
            return
        print(
            f"step {step}: not saved to host memory: uploads hold every spare slot",
            file=sys.stderr,
            flush=True,
        )


def _combine(rows: Tensor) -> Tensor:
    """Norm and loss add up; of the flags the smallest counts."""
    return torch.cat((sum_in_order(rows[:, :2]), rows[:, 2:].amin(dim=0)))
