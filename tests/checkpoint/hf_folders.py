"""What `transformers` does in tests of conversion: a program, as it takes long to import.

`save FOLDER` writes a small model of each config to a folder of its own, in several files. It
writes the tokens that each generates after `PROMPT` to `GOES_ON`, and the likelihood that each
gives the last tokens of `PROMPT` to `LIKELIHOODS`.
`compare ONE OTHER` holds the logits of every model in ONE to those of the same name in OTHER.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.trainer.hf_models import CAUSAL, CONFIGS, load, logits_of

if TYPE_CHECKING:
    import pytest

PROMPT, GENERATED, NUM_LAST = [3, 14, 15, 92, 65, 35, 89, 79], 6, 3
GOES_ON, LIKELIHOODS = "goes-on.json", "likelihoods.json"
_ROOT = Path(__file__).parents[2]


def saved(factory: pytest.TempPathFactory) -> Path:
    """What `save` writes: once, for all processes of a run of the tests. Do not change it."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, begun = root / "hf-folders", root / "hf-folders.begun"
    with (root / "hf-folders.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            begun.mkdir(exist_ok=True)
            run("save", begun)
            begun.rename(folder)
    return folder


def run(*arguments: object) -> str:
    """What the program prints."""
    command = [sys.executable, "-m", "tests.checkpoint.hf_folders", *map(str, arguments)]
    done = subprocess.run(
        command, check=True, cwd=_ROOT, timeout=240, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def save(folder: Path) -> None:
    _save_models(folder)
    for name, found in ((GOES_ON, _go_on(folder)), (LIKELIHOODS, _likelihoods(folder))):
        (folder / name).write_text(json.dumps(found))


def _save_models(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    for name, (model_class, config_class, options) in CONFIGS.items():
        config = getattr(transformers, config_class)(**options)
        model = getattr(transformers, model_class)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.5 + 0.2 * torch.randn_like(parameter))
        model.bfloat16().save_pretrained(folder / name, max_shard_size="20KB")
        (folder / name / "tokenizer.json").write_text("{}")


def compare(one: Path, other: Path) -> None:
    import torch

    tokens = torch.arange(24).view(2, 12)
    for name in sorted(path.name for path in other.iterdir()):
        logits = [logits_of(load(each / name)(tokens)) for each in (one, other)]
        print(name, torch.equal(*logits))


def _go_on(folder: Path) -> dict[str, list[int]]:
    """What each model likes best behind a prompt, token by token."""
    import torch

    found = {}
    for name in CAUSAL:
        model = load(folder / name)
        tokens = torch.tensor([PROMPT])
        for _ in range(GENERATED):
            with torch.no_grad():
                best = model(tokens, use_cache=False).logits[:, -1:].argmax(-1)
            tokens = torch.cat((tokens, best), dim=1)
        found[name] = tokens[0, len(PROMPT) :].tolist()
    return found


def _likelihoods(folder: Path) -> dict[str, tuple[float, bool]]:
    """Of the last `NUM_LAST` tokens of `PROMPT`, and whether they are the likeliest."""
    import torch

    found = {}
    for name in CAUSAL:
        model = load(folder / name)
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT[:-1]])).logits[0, -NUM_LAST:]
        logs = torch.log_softmax(logits.double(), dim=-1)
        targets = torch.tensor(PROMPT[-NUM_LAST:])
        log_likelihood = sum(float(logs[place, token]) for place, token in enumerate(targets))
        found[name] = (log_likelihood, bool((logs.argmax(-1) == targets).all()))
    return found


if __name__ == "__main__":
    commands: dict[str, Any] = {"save": save, "compare": compare}
    commands[sys.argv[1]](*map(Path, sys.argv[2:]))
