"""Where a `Trainer` of Lightning is, as `outlast.integrations.lightning` saves it."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher

from outlast.session.objects import RandomStates


class Place:
    """Where a `Trainer` is: in its loops, its data, its callbacks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.is_within_epoch = False
        self.first_batch = 0
        """What the loop counted before the first batch of this epoch was read."""
        self.before_iterator: dict[str, Any] = {}
        """The generators of random numbers, before the epoch's iterator was made."""
        self.is_first_iterator = False
        """It is the first of its loader, whose workers began with it."""
        self.before_batches: dict[str, Any] = {}
        """The same, before its first batch was read."""
        self._world_size = trainer.world_size

    @property
    def has_stateful_loader(self) -> bool:
        """Whether a loader knows its own place, which Lightning saves and restores."""
        return any(isinstance(each, _Stateful) for each in self._loaders)

    @property
    def _loaders(self) -> list[Any]:
        combined = self._trainer.fit_loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    def check_loaders(self, data_fetcher: Any) -> None:
        """Raises ValueError: no place could be found in what these read."""
        if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
            raise ValueError(
                "SessionCallback takes no training_step(dataloader_iter), which may have read more "
                "batches than it trained on: have it take a batch"
            )
        if self.has_stateful_loader:
            for each in self._loaders:
                if not isinstance(each, _Stateful):
                    raise ValueError(
                        "SessionCallback takes loaders that all have a state, or none of them: "
                        f"{type(each).__name__} has none"
                    )

    def find_batches(self, data_fetcher: Any, random: RandomStates) -> None:
        """Begin the epoch's batches anew, and pass those that are done."""
        trainer = self._trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        count = progress.ready - self.first_batch
        if self.has_stateful_loader:
            if self._world_size != trainer.world_size:
                raise ValueError(
                    f"the place of a loader with a state was saved by {self._world_size} ranks, "
                    f"and there are {trainer.world_size}: go on with as many, or use "
                    "torch.utils.data.DataLoader"
                )
            return
        if self._world_size != trainer.world_size:
            # Of a step each rank takes one of as many batches. Those of a part of a step are read
            # again, and so are those of accumulated gradients.
            count = count * self._world_size // trainer.world_size
            count = min(count, trainer.num_training_batches - 1)
            count -= count % trainer.accumulate_grad_batches
            self.first_batch, self._world_size = 0, trainer.world_size
            for name in vars(progress):
                setattr(progress, name, count)
        # What draws the order of an epoch draws the same.
        random.load_state_dict(self.before_iterator)
        if self.is_first_iterator:
            # Workers that are kept from epoch to epoch draw a seed only when they begin.
            for each in self._loaders:
                if getattr(each, "_iterator", None) is not None:
                    each._iterator = None
        iter(data_fetcher)
        random.load_state_dict(self.before_batches)
        try:
            for _ in range(count):
                next(data_fetcher)
        except StopIteration as error:
            raise RuntimeError(
                f"{count} batches of this epoch are done, and now there are fewer in it: "
                "go on with the same data"
            ) from error
        # What tells the last batch counts as the loop does.
        data_fetcher.fetched += self.first_batch

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "loops": trainer.fit_loop.state_dict(),
            "others": {key: each.state_dict() for key, each in self._stateful.items()},
            "hooks": Hooks(trainer).saved(),
            "should_stop": trainer.should_stop,
            "metrics": dict(trainer._logger_connector._callback_metrics),
            "is_within_epoch": self.is_within_epoch,
            "first_batch": self.first_batch,
            "before_iterator": self.before_iterator,
            "before_batches": self.before_batches,
            "is_first_iterator": self.is_first_iterator,
            "world_size": self._world_size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state_dict["loops"])
        Hooks(trainer).load(state_dict["hooks"])
        for key, each in self._stateful.items():
            if state_dict["others"].get(key):
                each.load_state_dict(state_dict["others"][key])
        trainer.should_stop = state_dict["should_stop"]
        trainer._logger_connector._callback_metrics.update(state_dict["metrics"])
        self.is_within_epoch = state_dict["is_within_epoch"]
        self.first_batch = state_dict["first_batch"]
        self.before_iterator = state_dict["before_iterator"]
        self.before_batches = state_dict["before_batches"]
        self.is_first_iterator = state_dict["is_first_iterator"]
        self._world_size = state_dict["world_size"]

    @property
    def _stateful(self) -> dict[str, Any]:
        """Callbacks, the data module, and what scales losses."""
        trainer = self._trainer
        found = {each.state_key: each for each in trainer.callbacks}
        found["precision_plugin"] = trainer.precision_plugin
        if trainer.datamodule is not None:
            found["datamodule"] = trainer.datamodule
        return found


class Hooks:
    """`on_save_checkpoint` and `on_load_checkpoint` of the module and of callbacks.

    They are given a checkpoint as Lightning's own ones are. What they add to it or replace in it
    is saved; the rest of it the session has.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._callbacks = [each for each in trainer.callbacks if _has_own(type(each), Callback)]
        self._has_any = bool(self._callbacks) or _has_own(type(self._module), LightningModule)

    def saved(self) -> dict[str, Any]:
        """What the hooks want saved."""
        if not self._has_any:
            return {}
        checkpoint = self._checkpoint()
        given = dict(checkpoint)
        for each in self._callbacks:
            each.on_save_checkpoint(self._trainer, self._module, checkpoint)
        self._module.on_save_checkpoint(checkpoint)
        changed = {key: each for key, each in checkpoint.items() if given.get(key) is not each}
        # The weights need no second copy, under whatever name.
        weights = [key for key, each in changed.items() if each is given["state_dict"]]
        return {
            "changed": {key: each for key, each in changed.items() if key not in weights},
            "weights": weights,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Give them what they saved, once the weights are loaded."""
        if not self._has_any or not saved:
            return
        checkpoint = self._checkpoint()
        weights = dict.fromkeys(saved["weights"], checkpoint["state_dict"])
        checkpoint |= {**saved["changed"], **weights}
        self._module.on_load_checkpoint(checkpoint)
        for each in self._callbacks:
            each.on_load_checkpoint(self._trainer, self._module, checkpoint)

    def _checkpoint(self) -> dict[str, Any]:
        """As Lightning's own ones begin."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": lightning_version,
            "state_dict": self._module.state_dict(),
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks},
            "optimizer_states": [each.state_dict() for each in trainer.optimizers],
            "lr_schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
            "hyper_parameters": dict(self._module.hparams),
        }


def _has_own(kind: type, base: type) -> bool:
    names = ("on_save_checkpoint", "on_load_checkpoint")
    return any(getattr(kind, name) is not getattr(base, name) for name in names)
