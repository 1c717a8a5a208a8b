"""A script of the tests: Hugging Face's `Trainer`, of which each step has 8 samples on all ranks.

`hugging_face_ddp.py FOLDER [STEP]`: raise there; prints what each step saw, by the step.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from outlast.integrations.hugging_face import use_session


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.step = 0
        self.seen: dict[int, list[float]] = {}

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.seen.setdefault(self.step, []).extend(labels.flatten().tolist())
        return {"loss": (self.layer(inputs) - labels).square().mean() / 2500}


class Noting(TrainerCallback):  # type: ignore[misc]  # it is not read for its types
    def __init__(self, model: Model, fault: str) -> None:
        self.model = model
        self.fault = fault

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.model.step = state.global_step
        if f"{state.global_step}" == self.fault:
            print(json.dumps(self.model.seen), flush=True)
            raise RuntimeError("on_step_begin")


def main() -> None:
    set_seed(0)
    data = [
        {"inputs": torch.tensor([row / 48]), "labels": torch.tensor([row])} for row in range(48)
    ]
    model = Model()
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 // int(os.environ["WORLD_SIZE"]),
        num_train_epochs=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    fault = sys.argv[2] if sys.argv[2:] else ""
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Noting(model, fault)])
    use_session(trainer)
    trainer.train()
    print(json.dumps(model.seen), flush=True)


if __name__ == "__main__":
    main()
