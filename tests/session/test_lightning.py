"""`SessionCallback`: what follows a fault is what would have been, to the bit."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from outlast import session
from tests.session.in_process import FaultError, HostMemory, memory

lightning = pytest.importorskip("lightning")
integration = pytest.importorskip("outlast.integrations.lightning")

from lightning.pytorch.callbacks import (  # noqa: E402
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
)
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402

__all__ = ["memory"]

# Of 48 samples, in batches of 8.
STEPS_OF_EPOCH = 6
EPOCHS = 3


class Model(lightning.LightningModule):  # type: ignore[misc]  # Lightning is not read for its types
    """Draws random numbers wherever it can, and has a state that its own hooks change."""

    def __init__(self, fault: tuple[str, int] = ("", -1)) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.register_buffer("mean", torch.zeros(()))
        self.fault = fault
        self.losses: dict[int, list[float]] = {}
        self.evaluated: list[int] = []
        self.hooks: list[str] = []
        self.own = 0

    def strike(self, hook: str) -> None:
        self.hooks.append(hook)
        if self.fault == (hook, self.global_step):
            raise FaultError(hook)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.strike("training_step")
        loss: Tensor = (self.layers(batch[0]) - batch[0].sum(dim=1, keepdim=True)).square().mean()
        self.losses.setdefault(self.global_step, []).append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.strike("validation_step")
        loss = self.layers(batch[0] + torch.randn(4)).square().mean()
        self.log("loss_there", loss + self.mean)

    def on_train_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        torch.rand(2)

    def on_train_batch_end(self, *_: Any) -> None:
        self.strike("on_train_batch_end")
        self.mean += torch.rand(()) * 0.01
        self.own += 1

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.evaluated.append(self.global_step)

    def on_train_epoch_end(self) -> None:
        self.strike("on_train_epoch_end")
        self.mean *= 0.5

    def on_train_end(self) -> None:
        self.strike("on_train_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = self.own

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.own = checkpoint["own"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "loss_there"},
        }

    @property
    def result(self) -> dict[str, Any]:
        return {"own": self.own, **{key: each.tolist() for key, each in self.state_dict().items()}}


class Stream(IterableDataset[list[Tensor]]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        for row in torch.randn(48, 4, generator=torch.Generator().manual_seed(0)):
            yield [row]


def shuffled(rows: Any, size: int) -> DataLoader[Any]:
    return DataLoader(rows, size, shuffle=True)


def streamed(_: Any, size: int) -> DataLoader[Any]:
    return DataLoader(Stream(), size)


def with_workers(rows: Any, size: int) -> DataLoader[Any]:
    return DataLoader(rows, size, shuffle=True, num_workers=1, persistent_workers=True)


def stateful(rows: Any, size: int) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(rows, size, shuffle=True)


def fit(
    fault: tuple[str, int] = ("", -1),
    *,
    callbacks: Any = (),
    every_steps: int = 1,
    ckpt_path: Path | None = None,
    loader: Callable[..., Any] = shuffled,
    model: type[Model] = Model,
    **options: Any,
) -> Model:
    """One attempt of a script; how its model ended."""
    lightning.seed_everything(0, verbose=False)
    rows = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    data = loader(TensorDataset(rows), 8)
    module = model(fault)
    given: dict[str, Any] = {"max_epochs": EPOCHS, "enable_checkpointing": False, **options}
    trainer = lightning.Trainer(
        accelerator="cpu",
        # Before the others, as whoever has no reason to do otherwise puts it.
        callbacks=[integration.SessionCallback(every_steps=every_steps), *callbacks],
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )
    try:
        trainer.fit(module, data, DataLoader(TensorDataset(rows), 24), ckpt_path=ckpt_path)
    except FaultError:
        module.hooks.append("fault")
    return module


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def ema() -> Any:
    return EMAWeightAveraging(decay=0.5)


def same_after(memory: HostMemory, fault: tuple[str, int], **options: Any) -> Model:
    """Strike an attempt, have another go on: both do what one does; the second's model."""
    callbacks = options.pop("callbacks", list)
    undisturbed = fit(callbacks=callbacks(), **options)
    memory.reset()
    struck = fit(fault, callbacks=callbacks(), **options)
    assert struck.hooks[-1] == "fault"
    saved = memory.saved_steps[-1] if memory.saved_steps else 0
    second = fit(callbacks=callbacks(), **options)
    assert min(second.losses) == saved
    assert second.losses == {
        step: losses for step, losses in undisturbed.losses.items() if step >= saved
    }
    kept = {step: losses for step, losses in struck.losses.items() if step < saved}
    assert kept == {step: losses for step, losses in undisturbed.losses.items() if step < saved}
    assert second.result == undisturbed.result
    assert second.evaluated == [step for step in undisturbed.evaluated if step > saved]
    return second


@pytest.mark.parametrize(
    "fault",
    [
        ("training_step", 1),
        # The first step of the second epoch, whose batches come in another order.
        ("training_step", STEPS_OF_EPOCH),
        ("training_step", STEPS_OF_EPOCH + 3),
        ("on_train_batch_end", STEPS_OF_EPOCH + 2),
        ("validation_step", 2 * STEPS_OF_EPOCH),
        ("on_train_epoch_end", 2 * STEPS_OF_EPOCH),
        ("validation_step", EPOCHS * STEPS_OF_EPOCH),
        ("on_train_end", EPOCHS * STEPS_OF_EPOCH),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="epochs"),
        pytest.param({"max_epochs": -1, "max_steps": EPOCHS * STEPS_OF_EPOCH}, id="steps"),
    ],
)
def test_what_follows_a_fault_is_what_would_have_been(
    memory: HostMemory, fault: tuple[str, int], options: dict[str, Any]
) -> None:
    same_after(memory, fault, callbacks=lambda: [ema()], **options)
    # Each step but those before an end of an epoch: these are there when its hooks have run.
    assert sorted(set(memory.saved_steps)) == list(range(1, EPOCHS * STEPS_OF_EPOCH))


def test_a_step_that_a_validation_follows_is_saved_after_it(memory: HostMemory) -> None:
    options = {"val_check_interval": 2, "callbacks": lambda: [ema()]}
    struck = STEPS_OF_EPOCH + 3
    assert same_after(memory, ("training_step", struck), **options).evaluated[0] == struck + 1
    memory.reset()
    same_after(memory, ("validation_step", STEPS_OF_EPOCH + 4), **options)


@pytest.mark.parametrize("loader", [streamed, with_workers, stateful])
def test_loaders_of_other_kinds_go_on_where_they_were(
    memory: HostMemory, loader: Callable[..., Any]
) -> None:
    for step in (3, STEPS_OF_EPOCH, STEPS_OF_EPOCH + 2):
        memory.reset()
        same_after(memory, ("training_step", step), loader=loader)


def test_fewer_batches_than_were_done_are_named(memory: HostMemory) -> None:
    fit(("training_step", 5), loader=streamed)
    memory.change('["first_batch",0]', '["first_batch",-20]')
    with pytest.raises(RuntimeError, match="25 batches of this epoch are done, and now there are"):
        fit(loader=streamed)


def test_a_save_that_is_due_waits_for_what_can_be_saved(memory: HostMemory) -> None:
    # Of an epoch's 3 steps, the last is saved with the next epoch, and 4 with what is left of it.
    options: dict[str, Any] = {"every_steps": 3, "accumulate_grad_batches": 2, "max_epochs": 4}
    same_after(memory, ("training_step", 7), **options)
    assert memory.saved_steps == [3, 6, 9]
    memory.reset()
    fit(every_steps=4, accumulate_grad_batches=2, max_epochs=4)
    assert memory.saved_steps == [4, 8]
    memory.reset()
    # The step that is due is the one before the end of an epoch, each time.
    fit(every_steps=STEPS_OF_EPOCH)
    assert memory.saved_steps == [STEPS_OF_EPOCH, 2 * STEPS_OF_EPOCH]


@pytest.mark.parametrize("stop_at", [STEPS_OF_EPOCH + 2, STEPS_OF_EPOCH])
def test_a_pause_ends_at_once_and_goes_on_later(memory: HostMemory, stop_at: int) -> None:
    options: dict[str, Any] = {"callbacks": [ema()], "min_epochs": EPOCHS, "min_steps": 18}
    undisturbed = fit(**options)
    memory.reset()
    memory.stop_at = stop_at
    paused = fit(**{**options, "callbacks": [ema()]})
    assert memory.saved_steps[-1] == stop_at
    # Neither a validation nor an epoch's end in the midst of one.
    assert paused.evaluated == [STEPS_OF_EPOCH]
    assert paused.hooks.count("on_train_epoch_end") == 1
    assert paused.hooks[-1] == "on_train_end"

    memory.stop_at = -1
    later = fit(**{**options, "callbacks": [ema()]})
    assert paused.losses.keys() | later.losses.keys() == undisturbed.losses.keys()
    assert later.result == undisturbed.result


def test_an_early_stop_that_waits_for_its_epoch_is_not_forgotten(memory: HostMemory) -> None:
    def callbacks() -> list[Any]:
        # Every loss is worse than this one, so that one validation is enough.
        return [EarlyStopping("loss_there", patience=1, stopping_threshold=1e9)]

    options: dict[str, Any] = {"callbacks": callbacks, "min_epochs": 2}
    second = same_after(memory, ("training_step", STEPS_OF_EPOCH + 2), **options)
    assert max(second.losses) == 2 * STEPS_OF_EPOCH - 1


def test_the_sessions_state_goes_before_that_of_ckpt_path(
    memory: HostMemory, tmp_path: Path
) -> None:
    undisturbed = fit()
    memory.reset()
    keeper = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=4)
    fit(("training_step", 9), callbacks=[keeper], enable_checkpointing=True)
    last = tmp_path / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 8

    class Late(SingleDeviceStrategy):  # type: ignore[misc]  # Lightning is not read for its types
        """Loads that of `ckpt_path` once all is set up, as that of FSDP 2 does."""

        restore_checkpoint_after_setup = True

    for strategy in (SingleDeviceStrategy, Late):
        goes_on = fit(("on_train_epoch_end", 12), ckpt_path=last, strategy=strategy("cpu"))
        assert min(goes_on.losses) == 9
        assert goes_on.losses.items() <= undisturbed.losses.items()
        memory.reset()
        # Without a state of its own the session leaves it to Lightning.
        lightnings = fit(("training_step", 9), ckpt_path=last, strategy=strategy("cpu"))
        assert min(lightnings.losses) == 8
        memory.reset()
        fit(("training_step", 9))


def test_a_place_in_the_data_of_other_ranks_is_found(memory: HostMemory) -> None:
    seen: list[list[float]] = []

    class Noting(Model):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            seen.append(batch[0][:, 0].tolist())
            return super().training_step(batch, index)

    fit(model=Noting)
    order = seen[STEPS_OF_EPOCH : 2 * STEPS_OF_EPOCH]
    memory.reset()
    fit(("training_step", STEPS_OF_EPOCH + 2))
    # Two batches of each of 2 ranks are four of one.
    memory.change('["world_size",1]', '["world_size",2]')
    seen.clear()
    second = fit(model=Noting, max_epochs=2)
    assert seen == order[4:]
    assert sorted(second.losses) == [8, 9]
    assert second.evaluated == [10]

    # What a loader says of itself is another matter.
    memory.reset()
    fit(("training_step", 3), loader=stateful)
    memory.change('["world_size",1]', '["world_size",2]')
    with pytest.raises(ValueError, match="was saved by 2 ranks, and there are 1: go on with as"):
        fit(loader=stateful)


def test_what_a_session_cannot_take_is_refused(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = fit().trainer
    with pytest.raises(RuntimeError, match=r"one fit\(\) of a process.* run others before it or"):
        trainer.fit(Model(), DataLoader(TensorDataset(torch.zeros(8, 4)), 8))

    class FSDP(integration.FSDPStrategy):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            pass

    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer._accelerator_connector.strategy = FSDP()
    with pytest.raises(ValueError, match="and not FSDP: go on from Lightning's own checkpoints"):
        integration.SessionCallback().on_fit_start(trainer, Model())

    class ReadingAhead(Model):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            return super().training_step(*next(dataloader_iter)[:2])

    with pytest.raises(ValueError, match=r"no training_step\(dataloader_iter\).* take a batch"):
        fit(model=ReadingAhead)

    with pytest.raises(ValueError, match="all have a state, or none of them: DataLoader has none"):
        fit(loader=lambda *given: [shuffled(*given), stateful(*given)])

    monkeypatch.setattr(integration, "_WRAPPED_OF_EPOCH", ("on_run_begin",))
    with pytest.raises(RuntimeError, match=r"has no _TrainingEpochLoop\.on_run_begin; outlast\["):
        fit()
    with pytest.raises(ValueError, match="every_steps=0; allowed: 1 and more"):
        integration.SessionCallback(every_steps=0)


def test_under_plain_python_the_callback_does_nothing(memory: HostMemory) -> None:
    with_session = fit()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(session, "is_active", lambda: False)
        memory.reset()
        plain = fit()
    assert plain.losses == with_session.losses
    assert plain.result == with_session.result
    assert (memory.saved_steps, memory.losses) == ([], {})
