"""What `transformers` does in tests of conversion: a program, as it takes long to import.

`save FOLDER` writes a small model of each config to a folder of its own, in several files.
`compare ONE OTHER` holds the logits of every model in ONE to those of the same name in OTHER.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.trainer.hf_models import CONFIGS

_ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> str:
    """What the program prints."""
    command = [sys.executable, "-m", "tests.checkpoint.hf_folders", *map(str, arguments)]
    done = subprocess.run(
        command, check=True, cwd=_ROOT, timeout=240, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def save(folder: Path) -> None:
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
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(24).view(2, 12)
    for name in sorted(path.name for path in other.iterdir()):
        logits = [load(each / name, dtype=torch.float32)(tokens).logits for each in (one, other)]
        print(name, torch.equal(*logits))


if __name__ == "__main__":
    {"save": save, "compare": compare}[sys.argv[1]](*map(Path, sys.argv[2:]))
