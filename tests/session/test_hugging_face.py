"""`use_session`: what follows a fault is what would have been, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outlast import session
from outlast.session.objects import Objects
from tests.session.in_process import FaultError, HostMemory, memory

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("outlast.integrations.hugging_face")

__all__ = ["memory"]

# Of 48 samples, in batches of 4, two of them a step.
STEPS_OF_EPOCH = 6
EPOCHS = 3
STEPS = EPOCHS * STEPS_OF_EPOCH


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.layers(inputs)
        return {"loss": (outputs - labels).square().mean(), "outputs": outputs}


class Noting(transformers.TrainerCallback):  # type: ignore[misc]  # it is not read for its types
    """Notes what a `Trainer` does, and ends it at one of these in one step."""

    def __init__(self, fault: tuple[str, int]) -> None:
        self.fault = fault
        self.events: list[str] = []
        self.losses: dict[int, float] = {}
        self.evaluated: list[int] = []
        self.saved: list[int] = []

    def _strike(self, event: str, state: Any) -> None:
        self.events.append(event)
        if self.fault == (event, state.global_step):
            self.events.append("fault")
            raise FaultError(event)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._strike("step_begin", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._strike("epoch_end", state)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._strike("prediction", state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.evaluated.append(state.global_step)
        self._strike("evaluated", state)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.saved.append(state.global_step)
        self._strike("saved", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._strike("train_end", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = logs["loss"]


class Trained:
    """How an attempt of a script ended."""

    def __init__(self, trainer: Any, noting: Noting) -> None:
        self.trainer = trainer
        self.noting = noting
        state = trainer.state
        self.weights = {key: each.tolist() for key, each in trainer.model.state_dict().items()}
        self.best = (state.best_metric, state.best_global_step)
        self.history = [
            {key: each for key, each in entry.items() if "runtime" not in key and "per" not in key}
            for entry in state.log_history
        ]


def train(
    folder: Path,
    fault: tuple[str, int] = ("", -1),
    *,
    every_steps: int = 1,
    callbacks: Any = (),
    resume: Any = None,
    **options: Any,
) -> Trained:
    """One attempt of a script."""
    transformers.set_seed(0)
    rows = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    data = [{"inputs": row, "labels": row.sum(0, keepdim=True)} for row in rows]
    noting = Noting(fault)
    given: dict[str, Any] = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        **options,
    }
    trainer = transformers.Trainer(
        Model(),
        transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            learning_rate=1e-2,
            **given,
        ),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=[noting, *callbacks],
    )
    trainer.pop_callback(transformers.PrinterCallback)
    integration.use_session(trainer, every_steps=every_steps)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except FaultError:
        assert noting.events[-1] == "fault"
    return Trained(trainer, noting)


def same_after(memory: HostMemory, folder: Path, fault: tuple[str, int], **options: Any) -> Trained:
    """Strike an attempt, have another go on: both do what one does; the second."""
    callbacks = options.pop("callbacks", list)
    undisturbed = train(folder / "undisturbed", callbacks=callbacks(), **options)
    reported = dict(memory.losses)
    memory.reset()
    struck = train(folder / "struck", fault, callbacks=callbacks(), **options)
    assert struck.noting.events[-1] == "fault"
    saved = memory.saved_steps[-1] if memory.saved_steps else 0
    second = train(folder / "struck", callbacks=callbacks(), **options)
    assert second.noting.losses == {
        step: loss for step, loss in undisturbed.noting.losses.items() if step > saved
    }
    assert memory.losses == reported
    assert second.weights == undisturbed.weights
    # But for what is measured of the call.
    assert second.history[:-1] == undisturbed.history[:-1]
    assert second.best == undisturbed.best
    for name in ("evaluated", "saved"):
        before, after, whole = (
            set(getattr(each.noting, name)) for each in (struck, second, undisturbed)
        )
        assert before | after == whole
        assert min(after, default=STEPS) >= saved
    return second


BY_EPOCH = {
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}
BY_STEPS = {**BY_EPOCH, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 4}


@pytest.mark.parametrize(
    "fault",
    [
        ("step_begin", 1),
        # The first step of the second epoch, whose batches come in another order.
        ("step_begin", STEPS_OF_EPOCH),
        ("step_begin", STEPS_OF_EPOCH + 3),
        ("epoch_end", STEPS_OF_EPOCH),
        ("prediction", 2 * STEPS_OF_EPOCH),
        ("saved", 2 * STEPS_OF_EPOCH),
        ("epoch_end", STEPS),
        ("prediction", STEPS),
        ("saved", STEPS),
        ("train_end", STEPS),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(BY_EPOCH, id="epochs"),
        pytest.param({**BY_STEPS, "save_steps": 4, "max_steps": STEPS}, id="steps"),
        pytest.param({**BY_EPOCH, "logging_strategy": "epoch"}, id="logged by epoch"),
    ],
)
def test_what_follows_a_fault_is_what_would_have_been(
    memory: HostMemory, tmp_path: Path, fault: tuple[str, int], options: dict[str, Any]
) -> None:
    same_after(memory, tmp_path, fault, **options)
    # Each but the last: with it goes what follows it, as does the report of an epoch's loss.
    last = STEPS_OF_EPOCH if options.get("logging_strategy") == "epoch" else STEPS
    assert sorted(set(memory.saved_steps)) == [step for step in range(1, STEPS) if step % last]
    if last != STEPS:
        assert [step for step, loss in memory.losses.items() if loss] == [6, 12, 18]


@pytest.mark.parametrize("options", [BY_EPOCH, {**BY_STEPS, "save_steps": 4}])
@pytest.mark.parametrize("event", ["evaluated", "train_end"])
def test_an_early_stop_is_the_same_after_a_fault(
    memory: HostMemory, tmp_path: Path, options: dict[str, Any], event: str
) -> None:
    def callbacks() -> list[Any]:
        # No loss is so much better.
        return [transformers.EarlyStoppingCallback(1, early_stopping_threshold=100.0)]

    at = 2 * (STEPS_OF_EPOCH if options is BY_EPOCH else 4)
    second = same_after(memory, tmp_path, (event, at), callbacks=callbacks, **options)
    assert second.trainer.state.global_step == at


def test_a_save_that_is_due_waits_for_the_next_step(memory: HostMemory, tmp_path: Path) -> None:
    class ShortEpochs(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_epoch_stop = state.global_step == 4

    train(tmp_path, every_steps=4, callbacks=[ShortEpochs()])
    assert memory.saved_steps == [5, 9, 13]
    memory.reset()
    same_after(memory, tmp_path, ("step_begin", 13), every_steps=4)
    assert memory.saved_steps == [4, 8, 12, 16]


@pytest.mark.parametrize("stop_at", [STEPS_OF_EPOCH, STEPS_OF_EPOCH + 2])
def test_a_pause_ends_at_once_and_goes_on_later(
    memory: HostMemory, tmp_path: Path, stop_at: int
) -> None:
    undisturbed = train(tmp_path / "undisturbed", **BY_EPOCH)
    memory.reset()
    memory.stop_at = stop_at
    paused = train(tmp_path / "paused", **BY_EPOCH)
    assert memory.saved_steps[-1] == stop_at
    # What is due at the end of the epoch is done later.
    before = [] if stop_at == STEPS_OF_EPOCH else [STEPS_OF_EPOCH]
    assert paused.noting.evaluated == paused.noting.saved == before
    assert session.should_stop()

    memory.stop_at = -1
    later = train(tmp_path / "paused", **BY_EPOCH)
    assert before + later.noting.evaluated == undisturbed.noting.evaluated
    assert later.weights == undisturbed.weights
    assert later.best == undisturbed.best


def test_the_sessions_state_goes_before_the_trainers_own(
    memory: HostMemory, tmp_path: Path
) -> None:
    undisturbed = train(tmp_path / "undisturbed")
    memory.reset()
    train(tmp_path, ("step_begin", 9), save_strategy="steps", save_steps=4)
    assert (tmp_path / "checkpoint-8").exists()

    goes_on = train(tmp_path, resume=True)
    assert min(goes_on.noting.losses) == 10
    assert goes_on.weights == undisturbed.weights

    # Without a state of the session the Trainer's own is loaded.
    memory.reset()
    others = train(tmp_path, ("step_begin", 11), resume=True)
    assert min(others.noting.losses) == 9
    assert memory.saved_steps == [9, 10, 11]
    assert train(tmp_path, resume=True).weights == undisturbed.weights

    # It may be of a later epoch than the session's.
    memory.reset()
    train(tmp_path, ("step_begin", 5))
    goes_on = train(tmp_path, resume=True)
    assert min(goes_on.noting.losses) == 6
    assert goes_on.weights == undisturbed.weights


def test_steps_of_another_size_are_refused(memory: HostMemory, tmp_path: Path) -> None:
    undisturbed = train(tmp_path)
    memory.reset()
    train(tmp_path, ("step_begin", 8))
    with pytest.raises(ValueError, match=r"counts steps of 8 samples.* steps of 16: set gradient_"):
        train(tmp_path, gradient_accumulation_steps=4)
    # Other batches are well, if a step has as many samples.
    other = train(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert sorted(other.noting.losses) == [step for step in undisturbed.noting.losses if step > 8]


def test_a_long_log_costs_a_save_no_more_than_a_copy(memory: HostMemory, tmp_path: Path) -> None:
    place = integration._Place(train(tmp_path, max_steps=3).trainer)
    state = place._trainer.state
    entries = [
        {"loss": 1.0 / step, "grad_norm": 1.5, "learning_rate": 1e-3, "epoch": 1.0, "step": step}
        for step in range(1, 10_001)
    ]
    short = memory.text_bytes
    memory.reset()
    state.log_history = entries
    objects = Objects({"trainer": place})
    memory.save(objects, 1)
    # None of it is in the text, which is written and read as JSON.
    assert memory.text_bytes < 2 * short
    state.log_history = [*entries, {"step": 0, "name": "a\u2028b\nc"}]
    memory.save(objects, 2)
    expected, state.log_history = state.log_history, []
    memory.restore(objects)
    assert state.log_history == expected
    # A log that has become shorter is another.
    state.log_history = [{"step": 1}]
    memory.save(objects, 3)
    memory.restore(objects)
    assert state.log_history == [{"step": 1}]


def test_what_a_session_cannot_take_is_refused(
    memory: HostMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = train(tmp_path, max_steps=2).trainer
    with pytest.raises(RuntimeError, match=r"one train\(\) of a process.* in a job of its own"):
        trainer.train()
    with pytest.raises(ValueError, match=r"no auto_find_batch_size=True.* set per_device_train_"):
        train(tmp_path, auto_find_batch_size=True)
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    with pytest.raises(ValueError, match="neither DeepSpeed nor FSDP 1: go on from the Trainer's"):
        integration.use_session(trainer)
    monkeypatch.setattr(integration, "_WRAPPED", ("_run_epochs",))
    with pytest.raises(RuntimeError, match=r"no Trainer\._run_epochs; outlast\[hf\] says which"):
        integration.use_session(trainer)


def test_a_session_changes_nothing(
    memory: HostMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_session = train(tmp_path / "session", **BY_EPOCH)
    monkeypatch.setattr(session, "is_active", lambda: False)
    plain = train(tmp_path / "plain", **BY_EPOCH)
    assert plain.weights == with_session.weights
    assert plain.noting.losses == with_session.noting.losses
