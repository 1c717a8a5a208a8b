"""The same as hf_trainer.py with a line more: checkpoints in host memory after each step.

Under plain Python or torchrun this line does nothing.

torchrun --nproc-per-node 2 hf_trainer_session.py --output /tmp/hf
"""

import argparse

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

from outlast import session
from outlast.integrations.hugging_face import use_session


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True, help="folder for the trained model")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    set_seed(0)
    sizes = {"vocab_size": 128, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    arguments = TrainingArguments(
        output_dir=options.output,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_steps=options.steps,
        include_num_input_tokens_seen="all",
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Counting(), callbacks=[PrintLoss()])
    use_session(trainer)
    trainer.train()
    # Asked to stop, it is not at its end yet.
    if not session.should_stop():
        trainer.save_model(options.output)


if __name__ == "__main__":
    main()
