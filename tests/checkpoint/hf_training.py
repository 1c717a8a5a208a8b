"""What `transformers` trains in tests of conversion: a program, as it takes long to import.

`train FOLDER [NAME ...]` writes a small model of each config to FOLDER/before and, after a few
steps of AdamW on FOLDER/causal.npz, FOLDER/masked.npz or FOLDER/ordered.npz, to FOLDER/after; the
losses go to FOLDER/losses.json.
`compare FOLDER` prints how far the models in FOLDER/exported are from those in FOLDER/after, by
the names of the former: the largest difference of logits, in parts of the largest logit, and that
of weights. What is exported as NAME@RUN is compared with NAME.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.trainer.hf_models import CAUSAL, CONFIGS, ORDERED, load, logits_of, loss_of

_ROOT = Path(__file__).parents[2]
# As the spec has it. Where a gradient is nearly zero, epsilon keeps its rounding out of the step:
# with 1e-8 that alone moves single weights by up to 1e-4, in either program.
MICRO_BATCH = 2
LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-5, 0.1, 1.0


def run(*arguments: object) -> str:
    """What the program prints."""
    command = [sys.executable, "-m", "tests.checkpoint.hf_training", *map(str, arguments)]
    done = subprocess.run(
        command, check=True, cwd=_ROOT, timeout=240, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def kind_of(name: str) -> str:
    """What a model is trained to predict."""
    if name in CAUSAL:
        return "causal"
    return "ordered" if name in ORDERED else "masked"


def model_of(run: str) -> str:
    """The name of the model that was trained in a run."""
    return run.partition("@")[0]


def train(folder: Path, *names: str) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    losses = {}
    for name in names or CONFIGS:
        model_class, config_class, options = CONFIGS[name]
        config = getattr(transformers, config_class)(**options)
        config._attn_implementation = config._experts_implementation = "eager"
        model = getattr(transformers, model_class)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # Larger than at the start of training, so that every part counts.
                start = 1.0 if float(parameter.flatten()[0]) == 1.0 else 0.0
                parameter.copy_(start + 0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / "before" / name)
        losses[name] = _steps(model, np.load(folder / f"{kind_of(name)}.npz"))
        model.save_pretrained(folder / "after" / name)
    (folder / "losses.json").write_text(json.dumps(losses))


def _steps(model: Any, batches: Any) -> list[float]:
    """The loss of each step."""
    import torch

    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": DECAY},
        {"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses = []
    for step in range(len(batches["tokens"])):
        parts = {name: torch.from_numpy(batches[name][step]) for name in batches}
        loss = loss_of(model, micro_batch=MICRO_BATCH, **parts)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compare(folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    tokens = torch.from_numpy(np.load(folder / "causal.npz")["tokens"][0])
    found = {}
    for run in sorted(path.name for path in (folder / "exported").iterdir()):
        ours, theirs = (
            load(each, attn_implementation="eager")
            for each in (folder / "exported" / run, folder / "after" / model_of(run))
        )
        with torch.no_grad():
            logits, expected = (logits_of(model(tokens)) for model in (ours, theirs))
        apart = (logits - expected).abs().max() / expected.abs().max()
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        weights = max((one - other).abs().max().item() for one, other in pairs)
        found[run] = (apart.item(), weights)
    print(json.dumps(found))


if __name__ == "__main__":
    command, folder, *names = sys.argv[1:]
    if command == "train":
        train(Path(folder), *names)
    else:
        compare(Path(folder))
