"""`outlast.session` for Lightning: checkpoints in host memory after each step.

    from outlast.integrations.lightning import SessionCallback

    trainer = lightning.Trainer(..., callbacks=[SessionCallback()])

What is to be saved of a batch or an epoch is there only when all hooks of it have run, the module's
and those of later callbacks, and the validation that is due. No callback is called then. So methods
of the `Trainer`'s loops, which are not part of its public interface, are wrapped.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from outlast import session
from outlast.session.objects import RandomStates

try:
    from lightning.pytorch import Callback
    from lightning.pytorch import __version__ as lightning_version
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

    from outlast.integrations.lightning_state import Place
except ImportError as error:
    raise ImportError(
        f"outlast.integrations.lightning needs lightning ({error}): "
        "pip install 'outlast[lightning]'"
    ) from error

_WRAPPED_OF_FIT = ("setup_data", "on_advance_start", "advance")
_WRAPPED_OF_EPOCH = ("on_run_start", "on_advance_end")


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
        self._fit: _Fit | None = None
        self._seen_step = self._logged_step = 0
        self._validation = ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore: everything is made, and no loop has begun.

        Raises:
            ValueError: the model is trained with DeepSpeed or FSDP 1, whose states are not tensors
                of the model and its optimizers.
            RuntimeError: it is another `fit` of this process, or this release of Lightning lacks a
                method that is wrapped.
        """
        if not self._is_active:
            return
        if self._fit is not None:
            raise RuntimeError(
                "SessionCallback is for one fit() of a process, whose steps its checkpoints count; "
                "this is another: give it to that Trainer only whose fit() is long, and run others "
                "before it or in a job of their own"
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy):
            raise ValueError(
                "SessionCallback takes DDP, ModelParallelStrategy (FSDP 2) and one process, and "
                f"not {type(trainer.strategy).__name__}: go on from Lightning's own checkpoints"
            )
        self._fit = _Fit(trainer, self._every_steps)
        self._fit.begin(pl_module)
        self._seen_step = self._logged_step = trainer.global_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Lightning has its own answer to the stop signal, an exception, set after `on_fit_start`.
        if self._is_active:
            session.should_stop()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step: int = trainer.global_step
        # Gradients are being accumulated.
        if not self._is_active or step == self._seen_step:
            return
        self._seen_step = step
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

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._is_active and not trainer.sanity_checking:
            self._validation.enter_context(session.box("evaluation"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._validation.close()


class _Fit:
    """A `fit` with a session.

    It saves after the batches of an epoch, and before the next epoch. What follows the last batch,
    as the hooks at the end of an epoch and of the training, is done again with the step before it
    if it is interrupted. A loader with a state is not saved between epochs: what draws random
    numbers when an iterator is made would draw otherwise.
    """

    def __init__(self, trainer: Any, every_steps: int) -> None:
        self._trainer = trainer
        self._every_steps = every_steps
        self._checkpoint = session.Checkpoint(None)
        self._random = RandomStates()
        self._place = Place(trainer)
        # As it was restored, until its place in the data is found.
        self._restored_random: dict[str, Any] | None = None
        self._saved_step = 0
        self._is_stopping = False
        self._loop = trainer.fit_loop
        self._epochs = trainer.fit_loop.epoch_loop

    def begin(self, pl_module: Any) -> None:
        """Restore, and follow the loops from now on."""
        self._wrap()
        trainer = self._trainer
        optimizers = {f"optimizer{index}": each for index, each in enumerate(trainer.optimizers)}
        configs = enumerate(trainer.lr_scheduler_configs)
        schedulers = {f"scheduler{index}": each.scheduler for index, each in configs}
        self._checkpoint = session.checkpoint(
            model=pl_module, trainer=self._place, **optimizers, **schedulers
        )
        if self._checkpoint.restore():
            self._forget_ckpt_path()
            self._restored_random = self._random.state_dict()
            if not self._place.is_within_epoch:
                self._restarted()
                # So that there is no sanity check.
                self._epochs.val_loop.restarting = True
        self._saved_step = trainer.global_step

    def _forget_ckpt_path(self) -> None:
        """That of `ckpt_path`, which Lightning would load now, is older."""
        connector = self._trainer._checkpoint_connector
        connector._loaded_checkpoint = {}
        if self._trainer.strategy.restore_checkpoint_after_setup:

            def skip(*given: Any, **named: Any) -> None:
                del connector._restore_modules_and_callbacks

            connector._restore_modules_and_callbacks = skip

    def _wrap(self) -> None:
        loop, epochs = self._loop, self._epochs
        for each, names in ((loop, _WRAPPED_OF_FIT), (epochs, _WRAPPED_OF_EPOCH)):
            for name in names:
                if not hasattr(each, name):
                    raise RuntimeError(
                        f"Lightning {lightning_version} has no {type(each).__name__}.{name}; "
                        "outlast[lightning] says which releases fit"
                    )
        self._setup_data, loop.setup_data = loop.setup_data, self._before_iterator
        self._epoch_start, loop.on_advance_start = loop.on_advance_start, self._before_epoch
        self._advance, loop.advance = loop.advance, self._one_epoch
        self._run_start, epochs.on_run_start = epochs.on_run_start, self._before_batches
        self._batch_end, epochs.on_advance_end = epochs.on_advance_end, self._after_batch

    def _before_iterator(self) -> None:
        """In place of `setup_data`, which makes the iterator of the first epoch."""
        if self._restored_random is None and self._loop._combined_loader is None:
            self._place.before_iterator = self._random.state_dict()
            self._place.is_first_iterator = True
        self._setup_data()

    def _before_epoch(self) -> None:
        """In place of `on_advance_start`, between two epochs or before the first."""
        if not self._place.has_stateful_loader:
            self._save(is_within_epoch=False)
            self._stop_if_asked()
        if self._restored_random is not None and not self._place.is_within_epoch:
            # Lightning makes a new iterator where it does not resume.
            self._restarted()
            self._random.load_state_dict(self._restored_random)
            self._restored_random = None
        self._epoch_start()

    def _one_epoch(self) -> None:
        """In place of `advance`, which the hooks at the end of the epoch follow."""
        self._advance()
        self._stop_if_asked()

    def _before_batches(self, data_fetcher: Any) -> None:
        """In place of `on_run_start`, which makes the iterator of a later epoch."""
        place = self._place
        place.check_loaders(data_fetcher)
        if self._restored_random is not None:
            self._run_start(data_fetcher)
            place.find_batches(data_fetcher, self._random)
            self._random.load_state_dict(self._restored_random)
            self._restored_random = None
            self._restarted()
            return
        if self._trainer.current_epoch > 0 and not self._loop.is_resuming:
            place.before_iterator = self._random.state_dict()
            place.is_first_iterator = False
        self._run_start(data_fetcher)
        place.before_batches = self._random.state_dict()
        place.first_batch = self._epochs.batch_progress.current.ready

    def _after_batch(self, data_fetcher: Any) -> None:
        """In place of `on_advance_end`, which validates if it is time to."""
        self._batch_end(data_fetcher)
        # Else the end of the epoch is next, which may be that of the training.
        if not self._epochs.done:
            self._save(is_within_epoch=True)
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        """As if there were no more batches: no hook at an end of an epoch, and no validation."""
        if self._is_stopping:
            raise StopIteration

    def _save(self, *, is_within_epoch: bool) -> None:
        step: int = self._trainer.global_step
        if step - self._saved_step < self._every_steps:
            return
        self._saved_step = step
        self._place.is_within_epoch = is_within_epoch
        self._checkpoint.save(step)
        self._is_stopping = session.should_stop()

    def _restarted(self) -> None:
        """The loops are where they were: what Lightning does otherwise in a restart ends here."""
        self._loop._restarting = self._loop._resuming_from_checkpoint = False
        self._epochs.restarting = False
