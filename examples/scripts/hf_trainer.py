"""Hugging Face's Trainer on a small GPT-2 with random weights, as one writes it for torchrun.

torchrun --nproc-per-node 2 hf_trainer.py --output /tmp/hf
"""

import argparse
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Counting(Dataset):
    """Each sequence counts on from some number, in steps of its own."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(32) * (1 + index % 7)) % 128
        return {"input_ids": tokens, "labels": tokens}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step} loss {logs['loss']:.9e}", flush=True)


def newest_checkpoint(output: Path) -> str | None:
    """The newest folder that all ranks have finished: Trainer writes it under its final name."""
    found = {}
    for folder in output.glob("checkpoint-*"):
        ranks = len(list(folder.glob("rng_state_*.pth")))
        if (folder / "trainer_state.json").exists() and ranks == int(os.environ["WORLD_SIZE"]):
            found[int(folder.name.partition("-")[2])] = str(folder)
    return found[max(found)] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    set_seed(0)
    sizes = {"vocab_size": 128, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    arguments = TrainingArguments(
        output_dir=str(options.output),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_steps=options.steps,
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Counting(), callbacks=[PrintLoss()])
    trainer.train(resume_from_checkpoint=newest_checkpoint(options.output))


if __name__ == "__main__":
    main()
