"""`outlast.session` for Lightning: checkpoints in host memory after each step.

    from outlast.integrations.lightning import SessionCallback

    trainer = lightning.Trainer(..., callbacks=[SessionCallback()])

The loops of the `Trainer` are restored as its own checkpoints restore them, before they begin. They
are saved where Lightning itself can go on from: after a batch, or at the end of an epoch. A step
that is followed by a validation is not saved: the validation would not be made up for.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from outlast import session
from outlast.session.objects import RandomStates

try:
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
except ImportError as error:
    raise ImportError(
        f"outlast.integrations.lightning needs lightning ({error}): "
        "pip install 'outlast[lightning]'"
    ) from error


class SessionCallback(Callback):  # type: ignore[misc]  # Lightning is not read for its types
    """Reports steps, saves to host memory, goes on from it, and stops when asked to.

    The loss reported is the mean over all ranks of what `training_step` returns, each
    `log_every_n_steps` of the `Trainer`. Under plain Python or torchrun it does nothing.
    """

    def __init__(self, *, every_steps: int = 1, tokens_per_step: int | None = None) -> None:
        """A checkpoint is saved each `every_steps`; tokens are those of the global batch.

        Raises:
            ValueError: `every_steps` is not positive.
        """
        if every_steps < 1:
            raise ValueError(f"every_steps={every_steps}; allowed: 1 and more")
        self._every_steps = every_steps
        self._tokens_per_step = tokens_per_step
        self._is_active = session.is_active()
        self._checkpoint = session.Checkpoint(None)
        self._place: _Place | None = None
        self._random = RandomStates()
        # As it was restored, until the batches that are done have been skipped.
        self._restored_random: dict[str, Any] | None = None
        self._is_first_epoch = True
        self._seen_step = self._logged_step = self._saved_step = 0
        self._validation = ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore: everything is made, and no loop has begun.

        Raises:
            ValueError: the model is trained with DeepSpeed or FSDP 1, whose states are not tensors
                of the model and its optimizers.
            RuntimeError: it is another `fit` of this process.
        """
        if not self._is_active:
            return
        if self._place is not None:
            raise RuntimeError("SessionCallback is for one fit() of a process; this is another")
        if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy):
            raise ValueError(
                "SessionCallback takes DDP, ModelParallelStrategy (FSDP 2) and one process, and "
                f"not {type(trainer.strategy).__name__}: go on from Lightning's own checkpoints"
            )
        self._place = _Place(trainer, self._random)
        optimizers = {f"optimizer{index}": each for index, each in enumerate(trainer.optimizers)}
        configs = enumerate(trainer.lr_scheduler_configs)
        schedulers = {f"scheduler{index}": each.scheduler for index, each in configs}
        self._checkpoint = session.checkpoint(
            model=pl_module, trainer=self._place, **optimizers, **schedulers
        )
        if self._checkpoint.restore():
            # That of `ckpt_path`, which Lightning would load now, is older.
            trainer._checkpoint_connector._loaded_checkpoint = {}
            self._restored_random = self._random.state_dict()
            self._is_first_epoch = not self._place.is_within_epoch
        if not self._place.is_within_epoch:
            self._place.epoch_random = self._random.state_dict()
        self._seen_step = self._logged_step = self._saved_step = trainer.global_step

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        if self._place is not None:
            self._place.epoch_random = self._random.state_dict()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on where the batches were."""
        if self._place is None:
            return
        # Lightning has its own answer to the stop signal, an exception, set after `on_fit_start`.
        session.should_stop()
        if self._restored_random is not None:
            # What draws the order of an epoch draws the same.
            self._random.load_state_dict(self._place.epoch_random)
            self._place.find_batches()
            if self._place.is_within_epoch:
                self._random.load_state_dict(self._restored_random)
            self._restored_random = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        # The iterator of the first epoch is there already.
        if self._place is not None and not self._is_first_epoch:
            self._place.epoch_random = self._random.state_dict()
        self._is_first_epoch = False

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step: int = trainer.global_step
        # Gradients are being accumulated.
        if self._place is None or step == self._seen_step:
            return
        self._seen_step = step
        self._report(trainer, step, outputs)
        if not trainer.is_last_batch and not self._place.is_validation_next:
            self._save(trainer, is_within_epoch=True)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        # What has a metric to go by, and has not yet, would miss it.
        plateaus = [each.reduce_on_plateau for each in trainer.lr_scheduler_configs]
        # Lightning goes on from there if it counts epochs.
        if self._place is not None and trainer.max_steps == -1 and not any(plateaus):
            self._save(trainer, is_within_epoch=False)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._is_active and not trainer.sanity_checking:
            self._validation.enter_context(session.box("evaluation"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._validation.close()

    def _report(self, trainer: Any, step: int, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if step % trainer.log_every_n_steps or not isinstance(loss, torch.Tensor):
            session.step(step)
            return
        mean = trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean").item()
        tokens = self._tokens_per_step
        if tokens is not None:
            tokens *= step - self._logged_step
        self._logged_step = step
        session.step(step, loss=mean, tokens=tokens)

    def _save(self, trainer: Any, *, is_within_epoch: bool) -> None:
        step: int = trainer.global_step
        if step == self._saved_step or step % self._every_steps:
            return
        assert self._place is not None, "it has begun"
        self._saved_step = step
        self._place.is_within_epoch = is_within_epoch
        self._checkpoint.save(step)
        if session.should_stop():
            trainer.should_stop = True


class _Place:
    """Where a `Trainer` is: in its loops, its data, its callbacks."""

    def __init__(self, trainer: Any, random: RandomStates) -> None:
        self._trainer = trainer
        self.is_within_epoch = False
        self.epoch_random = random.state_dict()
        """The generators of random numbers as they were before the epoch."""

    @property
    def is_validation_next(self) -> bool:
        """Whether validation follows this batch."""
        loop = self._trainer.fit_loop
        return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))

    def find_batches(self) -> None:
        """Begin the epoch's batches anew, and pass those that are done.

        Lightning made the iterators before it told the samplers the epoch, whose order it is.
        """
        loop = self._trainer.fit_loop
        for loader in loop._combined_loader.flattened:
            _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
        iter(loop._data_fetcher)
        if not self.is_within_epoch:
            return
        count = loop.epoch_loop.batch_progress.current.ready
        for _ in range(count):
            next(loop._data_fetcher)
        # The loop counts them, too.
        loop._data_fetcher.fetched -= count

    def state_dict(self) -> dict[str, Any]:
        return {
            "loops": self._trainer.fit_loop.state_dict(),
            "others": {key: each.state_dict() for key, each in self._stateful.items()},
            "is_within_epoch": self.is_within_epoch,
            "epoch_random": self.epoch_random,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state_dict["loops"])
        for key, each in self._stateful.items():
            if state_dict["others"].get(key):
                each.load_state_dict(state_dict["others"][key])
        self.is_within_epoch = state_dict["is_within_epoch"]
        self.epoch_random = state_dict["epoch_random"]

    @property
    def _stateful(self) -> dict[str, Any]:
        """Callbacks, the data module, and what scales losses."""
        trainer = self._trainer
        found = {each.state_key: each for each in trainer.callbacks}
        found["precision_plugin"] = trainer.precision_plugin
        if trainer.datamodule is not None:
            found["datamodule"] = trainer.datamodule
        return found
