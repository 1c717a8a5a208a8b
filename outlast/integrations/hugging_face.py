"""`outlast.session` for Hugging Face's `Trainer`: checkpoints in host memory after each step.

    from outlast.integrations.hugging_face import use_session

    trainer = Trainer(model, arguments, train_dataset=data)
    use_session(trainer)
    trainer.train()

A callback restores, but no callback can say where in the data the `Trainer` goes on, nor act when a
step's logs, evaluation and own checkpoint are done. So two methods of the `Trainer`, which are not
part of its public interface, are wrapped: `_run_epoch` and `_maybe_log_save_evaluate`.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from outlast import session
from outlast.session.objects import RandomStates

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        f"outlast.integrations.hugging_face needs transformers and accelerate ({error}): "
        "pip install 'outlast[hf]'"
    ) from error

_WRAPPED = ("_run_epoch", "_maybe_log_save_evaluate")
# Fields of TrainerState that change while it trains; the others follow from the arguments.
_FIELDS = (
    "global_step",
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
# The Trainer looks there for the random numbers of its own checkpoint, and finds none.
_NO_FOLDER = os.devnull


def use_session(trainer: Any, *, every_steps: int = 1) -> None:
    """Have a `Trainer` report its steps, and save to and go on from host memory.

    Call it before `trainer.train()`, on all ranks. A checkpoint is saved each `every_steps`. The
    losses reported are those that the `Trainer` logs (`logging_steps`). Under plain Python or
    torchrun it does nothing.

    Raises:
        ValueError: `every_steps` is not positive, the model is trained with DeepSpeed or FSDP 1,
            whose states are not tensors of the model and its optimizer, or the `Trainer` would
            look for its batch size.
        RuntimeError: this release of transformers lacks a method that is wrapped.
    """
    if every_steps < 1:
        raise ValueError(f"every_steps={every_steps}; allowed: 1 and more")
    if not session.is_active():
        return
    missing = [name for name in _WRAPPED if not hasattr(trainer, name)]
    if missing:
        raise RuntimeError(
            f"this release of transformers has no Trainer.{missing[0]}; outlast[hf] says which fit"
        )
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    if trainer.is_deepspeed_enabled or (plugin is not None and plugin.fsdp_version != 2):
        raise ValueError(
            "use_session takes DDP, FSDP 2 (fsdp_version: 2) and one process, and neither "
            "DeepSpeed nor FSDP 1: go on from the Trainer's own checkpoints there"
        )
    if trainer.args.auto_find_batch_size:
        raise ValueError(
            "use_session takes no auto_find_batch_size=True, with which the Trainer begins anew "
            "with smaller batches after an out-of-memory error: set per_device_train_batch_size to "
            "what it finds without a session"
        )
    _Wrapped(trainer, every_steps)


class _Wrapped:
    """A `Trainer` with a session.

    It saves after steps, once what the `Trainer` does then is done. A step that ends the epoch
    early or the training is not saved: the evaluation, the checkpoint and the choice of the best
    model that may follow are done again with it if they are interrupted.
    """

    def __init__(self, trainer: Any, every_steps: int) -> None:
        self._trainer = trainer
        self._every_steps = every_steps
        self._checkpoint: session.Checkpoint | None = None
        self._place = _Place(trainer)
        self._resumes = False
        self._random = RandomStates()
        # Set at the first step, once the batches before it have been skipped.
        self._random_at_step: dict[str, Any] | None = None
        self._reported_step = self._saved_step = self._steps_of_epoch = 0
        self._is_epoch_over = self._is_stopping = False
        self._reported_tokens = 0
        run_epoch, self._end_step = (getattr(trainer, name) for name in _WRAPPED)
        self._run_epoch = run_epoch
        for name, method in zip(_WRAPPED, (self._epoch, self._after_step), strict=True):
            setattr(trainer, name, method)
        # First, so that the others see what was restored.
        trainer.callback_handler.callbacks.insert(0, _Callback(self))

    def begin(self, model: Any, optimizer: Any, lr_scheduler: Any) -> None:
        """Restore, once everything is made and before any of it is used."""
        if self._checkpoint is not None:
            raise RuntimeError(
                "use_session is for one train() of a process, whose steps its checkpoints count; "
                "this is another: give max_steps or num_train_epochs for all of it, or train again "
                "in a job of its own, with a model that the first one saved"
            )
        scaler = self._trainer.accelerator.scaler
        self._checkpoint = session.checkpoint(
            model=model,
            optimizer=optimizer,
            scheduler=lr_scheduler,
            trainer=self._place,
            **({} if scaler is None else {"scaler": scaler}),
        )
        step = self._checkpoint.restore()
        self._resumes = step > 0
        if self._resumes:
            self._random_at_step = self._random.state_dict()
        self._reported_step = self._saved_step = self._trainer.state.global_step
        self._reported_tokens = self._trainer.state.num_input_tokens_seen

    def begin_step(self) -> None:
        """The batches of a step are there."""
        self._is_epoch_over = False
        if self._random_at_step is not None:
            self._random.load_state_dict(self._random_at_step)
            self._random_at_step = None

    def end_epoch(self) -> None:
        """What follows is of the epoch, and no longer of its last step."""
        self._is_epoch_over = True

    def logged(self, logs: dict[str, Any]) -> None:
        """The `Trainer` logs something of the present step."""
        if "loss" in logs:
            self._report(logs)

    def _epoch(self, **given: Any) -> None:
        """In place of `_run_epoch`."""
        epoch: int = given["epoch"]
        self._steps_of_epoch = given["num_update_steps_per_epoch"]
        if not self._resumes:
            self._whole_epoch(given)
            return
        if epoch < self._place.epoch or self._is_done:
            return
        self._resumes = False
        first = self._place.epoch
        self._rest_of_epoch({**given, "epoch": first})
        # The Trainer's own checkpoint was of a later epoch than the session's.
        given["resume_from_checkpoint"] = None
        for later in range(first + 1, epoch + 1):
            if not self._trainer.control.should_training_stop:
                self._whole_epoch({**given, "epoch": later})

    def _whole_epoch(self, given: dict[str, Any]) -> None:
        # As where the Trainer goes on from its own checkpoint: in the midst of one.
        batches = 0
        if given["epoch"] == given["epochs_trained"] and given["resume_from_checkpoint"]:
            batches = given["steps_trained_in_current_epoch"]
        steps = batches // self._trainer.args.gradient_accumulation_steps
        self._place.begin_epoch(given["epoch"], steps, self._random.state_dict())
        self._run_epoch(**given)

    def _rest_of_epoch(self, given: dict[str, Any]) -> None:
        """Go on after the batches that the restored state has seen."""
        arguments, place = self._trainer.args, self._place
        steps = 0 if arguments.ignore_data_skip else place.steps_in_epoch
        if 0 < steps < given["num_update_steps_per_epoch"]:
            # What draws the order of an epoch draws the same.
            self._random.load_state_dict(place.epoch_random)
        elif self._random_at_step is not None:
            self.begin_step()
        place.begin_epoch(given["epoch"], steps, place.epoch_random)
        given |= {
            "epochs_trained": given["epoch"],
            "steps_trained_in_current_epoch": steps * arguments.gradient_accumulation_steps,
            "resume_from_checkpoint": _NO_FOLDER,
        }
        self._run_epoch(**given)

    def _after_step(self, *arguments: Any, **named: Any) -> None:
        """In place of `_maybe_log_save_evaluate`, which follows each step and each epoch."""
        if self._is_stopping:
            # No evaluation and no checkpoint of the Trainer's holds up the end.
            self._report({})
            return
        trainer = self._trainer
        is_logged_later = self._is_logged_with_epoch
        if not trainer.control.should_log and not is_logged_later:
            self._report({})
        with self._phase():
            self._end_step(*arguments, **named)
        if not is_logged_later:
            self._report({})
            self._save()

    def _save(self) -> None:
        step, control = self._trainer.state.global_step, self._trainer.control
        # What follows an epoch would follow the restored step again: the next one is saved.
        is_due = step - self._saved_step >= self._every_steps and not self._is_epoch_over
        if not is_due or control.should_training_stop or control.should_epoch_stop:
            return
        assert self._checkpoint is not None, "training has begun"
        self._saved_step = step
        self._checkpoint.save(step)
        if session.should_stop():
            self._is_stopping = control.should_training_stop = True

    @property
    def _is_logged_with_epoch(self) -> bool:
        """Whether it is the last step of an epoch, whose losses the `Trainer` logs at its end."""
        if self._is_epoch_over or self._trainer.args.logging_strategy != "epoch":
            return False
        control = self._trainer.control
        is_last = self._place.steps_in_epoch == self._steps_of_epoch
        return is_last or control.should_training_stop or control.should_epoch_stop

    def _phase(self) -> AbstractContextManager[None]:
        """What takes long after this step has limits of its own."""
        control = self._trainer.control
        if control.should_evaluate:
            return session.box("evaluation")
        return session.box("checkpoint") if control.should_save else nullcontext()

    def _report(self, logs: dict[str, Any]) -> None:
        state = self._trainer.state
        if state.global_step == self._reported_step:
            return
        self._reported_step = state.global_step
        if "loss" not in logs:
            session.step(state.global_step)
            return
        tokens = state.num_input_tokens_seen - self._reported_tokens
        self._reported_tokens = state.num_input_tokens_seen
        session.step(
            state.global_step,
            loss=logs["loss"],
            tokens=tokens or None,
            grad_norm=logs.get("grad_norm", 0.0),
            learning_rate=logs.get("learning_rate", 0.0),
        )

    @property
    def _is_done(self) -> bool:
        state = self._trainer.state
        return bool(state.global_step >= state.max_steps)


class _Callback(TrainerCallback):  # type: ignore[misc]  # transformers is not read for its types
    """Passes on what the `Trainer` says in public."""

    def __init__(self, wrapped: _Wrapped) -> None:
        self._wrapped = wrapped

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._wrapped.begin(given["model"], given["optimizer"], given["lr_scheduler"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._wrapped.begin_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._wrapped.end_epoch()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        self._wrapped.logged(logs or {})


class _Place:
    """Where a `Trainer` is: its own state, and its place in the data."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._history = _History()
        self._first_step = 0
        self.epoch = 0
        self.epoch_random: dict[str, Any] = {}
        """The generators of random numbers as they were before the epoch."""

    @property
    def steps_in_epoch(self) -> int:
        """How many steps of the present epoch are done."""
        return int(self._trainer.state.global_step) - self._first_step

    def begin_epoch(self, epoch: int, steps: int, random: dict[str, Any]) -> None:
        """An epoch begins, or goes on after so many steps."""
        self.epoch, self.epoch_random = epoch, random
        self._first_step = self._trainer.state.global_step - steps

    def state_dict(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        return {
            "fields": json.dumps({name: getattr(state, name) for name in _FIELDS}),
            "log_history": self._history.of(state.log_history),
            "callbacks": json.dumps(
                [(type(each).__name__, each.state()) for each in self._stateful]
            ),
            "loss_since_log": trainer._tr_loss,
            "last_logged_step": trainer._globalstep_last_logged,
            "samples_per_step": self._samples_per_step,
            "epoch": self.epoch,
            "steps_in_epoch": self.steps_in_epoch,
            "epoch_random": self.epoch_random,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer, state = self._trainer, self._trainer.state
        if state_dict["samples_per_step"] != self._samples_per_step:
            raise ValueError(
                f"the checkpoint counts steps of {state_dict['samples_per_step']} samples, and "
                f"this Trainer makes steps of {self._samples_per_step}: set "
                "gradient_accumulation_steps or per_device_train_batch_size so that they are as "
                f"many on {trainer.args.world_size} ranks"
            )
        for name, value in json.loads(state_dict["fields"]).items():
            setattr(state, name, value)
        state.log_history = _History.entries(state_dict["log_history"])
        for each, (kind, saved) in zip(
            self._stateful, json.loads(state_dict["callbacks"]), strict=False
        ):
            if type(each).__name__ == kind:
                vars(each).update(saved.get("attributes", {}))
        trainer._tr_loss.copy_(state_dict["loss_since_log"])
        trainer._globalstep_last_logged = state_dict["last_logged_step"]
        # What the Trainer measures of this call begins here.
        trainer._initial_global_step = state.global_step
        trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen
        self.begin_epoch(
            state_dict["epoch"], state_dict["steps_in_epoch"], state_dict["epoch_random"]
        )

    @property
    def _samples_per_step(self) -> int:
        """On all ranks: what the place in the data, schedules and the end are counted in."""
        return int(self._trainer.get_total_train_batch_size(self._trainer.args))

    @property
    def _stateful(self) -> list[Any]:
        """Callbacks with a state, as that of early stopping."""
        callbacks = self._trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]


class _History:
    """The log of a training as lines of JSON, of which each is written once: it only grows.

    They are a tensor, which a save copies and does not look at.
    """

    def __init__(self) -> None:
        self._num_entries = self._num_bytes = 0
        self._lines = torch.zeros(4096, dtype=torch.uint8)

    def of(self, entries: list[dict[str, Any]]) -> torch.Tensor:
        """The entries; what stands behind them is zero."""
        if len(entries) < self._num_entries:
            self._num_entries = self._num_bytes = 0
            self._lines.zero_()
        new = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries[self._num_entries :])
        self._num_entries = len(entries)
        if new:
            end = self._num_bytes + len(new)
            if end > len(self._lines):
                # So that it seldom is a tensor of another size.
                longer = torch.zeros(2 * end, dtype=torch.uint8)
                longer[: self._num_bytes] = self._lines[: self._num_bytes]
                self._lines = longer
            self._lines[self._num_bytes : end] = torch.frombuffer(bytearray(new), dtype=torch.uint8)
            self._num_bytes = end
        return self._lines

    @staticmethod
    def entries(lines: torch.Tensor) -> list[dict[str, Any]]:
        """Those of which it was made."""
        text = lines.numpy().tobytes().rstrip(b"\0").decode()
        return [json.loads(line) for line in text.splitlines()]
